"""Metadata of a decoder's graph that describes the calls that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PADDING_SIDE, SHARED_BUFFER, LOGITS_TO_KEEP = "padding_side", "past_present_share_buffer", "logits_to_keep"
"""Names of the properties."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The calls that a decoder's graph takes, and the results that it returns.

    Attributes:
        shared_buffer: Whether past and present keys and values may be one buffer. Such a graph counts the tokens of a row by its
            mask: rows are padded on the right, and only a single row takes several tokens after a past.
        last_logits: Whether it returns logits of the last token of each row only.
    """

    shared_buffer: bool = False
    last_logits: bool = False

    @property
    def metadata(self) -> dict[str, str]:
        """Return the properties of the file."""
        shared = {SHARED_BUFFER: "1", PADDING_SIDE: "right"} if self.shared_buffer else {}
        return shared | ({LOGITS_TO_KEEP: "1"} if self.last_logits else {})

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Promise:
        """Read the properties of a file; a file that says nothing takes every call and returns all logits."""
        return cls(
            shared_buffer=metadata.get(SHARED_BUFFER) == "1",
            last_logits=metadata.get(LOGITS_TO_KEEP) == "1",
        )


EVERY_CALL = Promise()
"""The promise of a usual graph: every call, and logits of all tokens."""
