"""Write every byte of a piece."""

from __future__ import annotations

import os

PIECE_WEIGHTS = 1 << 20
"""Weights that are worked on at once, 4 MiB in float32: small beside any real tensor, large beside the cost of a call."""


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write every byte at ``offset``; a plain ``pwrite`` may write less.

    Raises:
        OSError: For example ENOSPC.
    """
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
