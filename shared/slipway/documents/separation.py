"""Keep text for calibration apart from held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slipway.counts import counted
from slipway.documents.overlap import frame, share_found, shingles, without
from slipway.errors import QuantizationError
from slipway.texts import printable

FEWEST_TOKENS = 1024
"""Fewest tokens of a calibration."""
MOST_NAMED = 5
"""Most documents that a message names."""
_MOST_OF_PASSAGE = 0.02
"""Share of a passage that may be in the held-out text: phrases are in many texts."""


@dataclass(frozen=True, slots=True)
class Separation:
    """Passages that are apart from a held-out text, and those that are not.

    Attributes:
        kept: The passages that are apart, with their documents.
        left_out: Number of the others.
        documents: Documents of the others, in order.
        overlap: Share of what is kept that the held-out text has, too.
    """

    kept: Mapping[str, str]
    left_out: int
    documents: tuple[str, ...]
    overlap: float

    def warning(self) -> str:
        """Return what was left out, and of which documents; empty if nothing was."""
        if not self.left_out:
            return ""
        every, named = self.left_out + len(self.kept), ", ".join(map(printable, self.documents[:MOST_NAMED]))
        more = " …" if len(self.documents) > MOST_NAMED else ""
        return (
            f"{self.left_out} of {counted(every, 'passage')} of the text for calibration are in the held-out text too, and are left out: "
            f"{named}{more}"
        )


def separate(passages: Mapping[str, str], held_out: str) -> Separation:
    """Tell passages that are in a held-out text, too, from the others. What frames most passages does not count.

    Args:
        passages: Passages with their documents.
        held_out: The held-out text.
    """
    every = [shingles(passage) for passage in passages]
    frames = frame(every)
    judged, own = without(shingles(held_out), frames), [without(each, frames) for each in every]
    apart = [share_found(each, judged) <= _MOST_OF_PASSAGE for each in own]
    places = list(zip(passages.items(), apart, strict=True))
    kept = [each for each, keep in zip(own, apart, strict=True) if keep]
    return Separation(
        kept=dict(place for place, keep in places if keep),
        left_out=apart.count(False),
        documents=tuple(dict.fromkeys(where for (_, where), keep in places if not keep)),
        overlap=share_found(np.unique(np.concatenate(kept)), judged) if kept else 0.0,
    )


def too_little_left(left_out: int, tokens: str) -> QuantizationError:
    """Return the error of text for calibration of which too little is apart from the held-out text.

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
