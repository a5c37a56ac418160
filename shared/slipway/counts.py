"""Format counts for people."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun in the singular or plural: ``1 file``, ``1,280 tokens``.

    Args:
        count: The number.
        noun: The noun in the singular; in a noun of several words, the last one takes the s.
        plural: The plural, if it is not made by an s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
