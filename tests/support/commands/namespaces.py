"""Network namespaces: separate hosts on this machine."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def namespace(name: str, *, net: int) -> Iterator[str]:
    """Make a network namespace joined to this machine by one cable, ``{name}a``; yield the address of this end.

    Raises:
        subprocess.CalledProcessError: This process lacks the necessary privileges.
    """
    here, there = f"{name}a", f"{name}b"
    commands = [
        f"ip netns add {name}",
        f"ip link add {here} type veth peer name {there} netns {name}",
        f"ip addr add 10.231.{net}.1/24 dev {here}",
        f"ip link set {here} up",
        f"ip -n {name} addr add 10.231.{net}.2/24 dev {there}",
        f"ip -n {name} link set {there} up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield f"10.231.{net}.1"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", here], capture_output=True)
