"""Ports of loopback for servers that have to know theirs beforehand, or are started again on the same."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Its own: what seeds the common one must not make two processes choose alike.
_chance = random.SystemRandom()


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody who does not ask for it by number.

    A port below the range from which connections and listeners without a number get theirs: between two starts of a server, no
    connection of another test can come to lie on it.
    """
    last = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    while True:
        port = _chance.randrange(_FIRST, last)
        with socket.socket() as found:
            # As servers do: connections of a server that was there before are no obstacle.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def free_ports(count: int) -> list[int]:
    """Several of them, no two alike."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)
