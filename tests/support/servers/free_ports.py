"""Choose loopback ports for servers that must know theirs beforehand or restart on the same one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# A separate generator: seeding the common one must not make two processes choose the same ports.
_chance = random.SystemRandom()


def free_port() -> int:
    """Return a free port that the system assigns only to programs that request it by number.

    The port is below the range of automatically assigned ports: between two starts of a server, no
    connection of another test can take it.
    """
    last = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    while True:
        port = _chance.randrange(_FIRST, last)
        with socket.socket() as found:
            # As servers do, so that connections of an earlier server do not block the port.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def free_ports(count: int) -> list[int]:
    """Return several different free ports."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)
