"""Measure how much of one text is also in another, in any language, by the bytes of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTH = 64
"""Bytes of a shingle, a piece of text that two texts share: some ten English words, or twenty Chinese characters."""
_SAMPLED_BITS = 3
"""One shingle of eight is compared, chosen by its hash alone, so the same ones of both texts."""
_SHARING, _FEWEST_SHARING, _FEWEST_TEXTS = 0.05, 3, 8
"""Share and number of texts from which on a shingle is a part of what frames them, and the number of texts that may have a frame."""
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_PIECE = 1 << 20

Hashes = NDArray[np.uint64]


def shingles(text: str) -> Hashes:
    """Return the sorted hashes of a text's sampled shingles, each once; upper case and the kind of white space do not count."""
    data = np.frombuffer(" ".join(text.casefold().split()).encode(errors="replace"), np.uint8)
    found = [_hashes(data[start : start + _PIECE + LENGTH - 1]) for start in range(0, max(len(data), 1), _PIECE)]
    return np.unique(np.concatenate(found))


def share_found(of: Hashes, among: Hashes) -> float:
    """Return the share of one text's shingles that another text has too; 0 for a text that is shorter than a shingle."""
    return float(_among(of, among).mean()) if len(of) else 0.0


def frame(every: Sequence[Hashes]) -> Hashes:
    """Return the shingles that many of some texts share: a template, a system prompt, the frame of a question, a license.

    What they share says nothing of whether one text is in another.
    """
    if len(every) < _FEWEST_TEXTS:
        return np.empty(0, np.uint64)
    found, counts = np.unique(np.concatenate(every), return_counts=True)
    return found[counts >= max(_FEWEST_SHARING, int(_SHARING * len(every)))]


def without(hashes: Hashes, others: Hashes) -> Hashes:
    """Return the shingles of a text that are not among others."""
    return hashes[~_among(hashes, others)]


def _among(hashes: Hashes, others: Hashes) -> NDArray[np.bool_]:
    """Return which hashes are among others, which are sorted: numpy's own function would sort them again for each passage."""
    if not len(others):
        return np.zeros(len(hashes), np.bool_)
    places = np.minimum(np.searchsorted(others, hashes), len(others) - 1)
    return others[places] == hashes


def _hashes(data: NDArray[Any]) -> Hashes:
    """Return the sampled hashes of all windows of LENGTH bytes: a polynomial modulo 2**64, then mixed."""
    count = len(data) - LENGTH + 1
    if count < 1:
        return np.empty(0, np.uint64)
    powers = np.full(len(data), _BASE, np.uint64)
    powers[0] = 1
    np.multiply.accumulate(powers, out=powers)
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers, out=sums[1:])
    back = np.full(count, _INVERSE, np.uint64)
    back[0] = 1
    np.multiply.accumulate(back, out=back)
    mixed = (sums[LENGTH:] - sums[:count]) * back
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return mixed[(mixed >> np.uint64(64 - _SAMPLED_BITS)) == 0]
