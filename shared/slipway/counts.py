"""Counts as people write them."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number and its noun, in the singular where there is one: ``1 file``, ``1,280 tokens``.

    Args:
        count: How many.
        noun: In the singular, also several words of which the last one takes the s.
        plural: Where an s does not make it.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
