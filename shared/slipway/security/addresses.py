"""Tell which addresses stay on this machine."""

from __future__ import annotations

_LOOPBACK = ("127.", "[::1]", "localhost:")


def is_private(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    return address.startswith(("unix:", *_LOOPBACK))
