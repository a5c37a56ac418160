"""Keep text for calibration apart from held-out text: measure how much of one is also in the other, by the bytes of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.errors import QuantizationError
from slipway.texts import counted, printable

FEWEST_TOKENS = 1024
"""Fewest tokens of a calibration."""
MOST_NAMED = 5
"""Most documents that a message names."""
_MOST_OF_PASSAGE = 0.02
"""Share of a passage that may be in the held-out text: phrases are in many texts."""

LENGTH = 64
"""Bytes of a shingle, a piece of text that two texts share: some ten English words, or twenty Chinese characters."""
_SAMPLED_BITS = 3
"""One shingle in eight is compared, chosen by its hash alone, so that the same ones are chosen in both texts."""
_SHARING, _FEWEST_SHARING, _FEWEST_TEXTS = 0.05, 3, 8
"""A shingle belongs to the frame if at least this share and this number of the texts have it. Fewer texts than the last number have no frame."""
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_PIECE = 1 << 20

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Separation:
    """Passages that are apart from a held-out text, and those that are not.

    Attributes:
        kept: The passages that are apart, with their documents.
        left_out: Number of the others.
        documents: Documents of the others, in order.
        overlap: Share of the kept text that the held-out text has too.
    """

    kept: Mapping[str, str]
    left_out: int
    documents: tuple[str, ...]
    overlap: float

    def warning(self) -> str:
        """Say what was left out, and from which documents; empty if nothing was."""
        if not self.left_out:
            return ""
        every, named = self.left_out + len(self.kept), ", ".join(map(printable, self.documents[:MOST_NAMED]))
        more = " …" if len(self.documents) > MOST_NAMED else ""
        return (
            f"{self.left_out} of {counted(every, 'passage')} of the text for calibration are in the held-out text too, and are left out: "
            f"{named}{more}"
        )


def separate(passages: Mapping[str, str], held_out: str) -> Separation:
    """Separate the passages that are also in a held-out text from the others. A frame that most passages share does not count.

    Args:
        passages: Passages with their documents.
        held_out: The held-out text.
    """
    every = [shingles(passage) for passage in passages]
    frames = frame(every)
    judged, own = remove_hashes(shingles(held_out), frames), [remove_hashes(each, frames) for each in every]
    apart = [overlap_share(each, judged) <= _MOST_OF_PASSAGE for each in own]
    places = list(zip(passages.items(), apart, strict=True))
    kept = [each for each, keep in zip(own, apart, strict=True) if keep]
    return Separation(
        kept=dict(place for place, keep in places if keep),
        left_out=apart.count(False),
        documents=tuple(dict.fromkeys(where for (_, where), keep in places if not keep)),
        overlap=overlap_share(_sort_once(np.concatenate(kept)), judged) if kept else 0.0,
    )


def too_little_left_error(left_out: int, tokens: str) -> QuantizationError:
    """Return the error of text for calibration with too little that is not in the held-out text.

    Args:
        left_out: Number of passages that are in both.
        tokens: What the others have, in words.
    """
    return QuantizationError(
        f"{counted(left_out, 'passage')} of the text for calibration are in the held-out text too, and the others have {tokens}, "
        f"and {counted(FEWEST_TOKENS, 'token')} are needed: a level that was fitted to the held-out text proves nothing on it",
        reason="CALIBRATION_OVERLAP",
        remedy="give more text for calibration, or hold other text out",
        about={"left_out": left_out, "tokens": tokens},
    )


def shingles(text: str) -> Hashes:
    """Return the sorted hashes of a text's sampled shingles, each once; upper case and the kind of white space do not count."""
    data = np.frombuffer(" ".join(text.casefold().split()).encode(errors="replace"), np.uint8)
    hashes = [_hashes(data[start : start + _PIECE + LENGTH - 1]) for start in range(0, max(len(data), 1), _PIECE)]
    return _sort_once(np.concatenate(hashes))


def _sort_once(hashes: Hashes) -> Hashes:
    """Sort hashes and keep each once; numpy's own function takes many times as long for a passage."""
    hashes.sort()
    different = np.ones(len(hashes), np.bool_)
    np.not_equal(hashes[1:], hashes[:-1], out=different[1:])
    return hashes[different]


def overlap_share(of: Hashes, among: Hashes) -> float:
    """Return the share of one text's shingles that another text has too; 0 for a text that is shorter than a shingle."""
    return float(_is_among(of, among).mean()) if len(of) else 0.0


def frame(every: Sequence[Hashes]) -> Hashes:
    """Return the shingles that many of some texts share: a template, a system prompt, the frame of a question, a license.

    Such shingles do not show whether one text is in another.
    """
    if len(every) < _FEWEST_TEXTS:
        return np.empty(0, np.uint64)
    hashes, counts = np.unique(np.concatenate(every), return_counts=True)
    return hashes[counts >= max(_FEWEST_SHARING, int(_SHARING * len(every)))]


def remove_hashes(hashes: Hashes, others: Hashes) -> Hashes:
    """Return the shingles of a text that are not among others."""
    return hashes[~_is_among(hashes, others)]


def _is_among(hashes: Hashes, others: Hashes) -> NDArray[np.bool_]:
    """Return which hashes are among others (sorted); numpy's own function would sort the others again for each passage."""
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
