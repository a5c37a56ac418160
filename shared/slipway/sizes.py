"""Parse and format sizes in bytes, and estimate the sizes of models and their outputs.

Stages and formats estimate with them before anything runs.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

from slipway.levels import LEVELS
from slipway.texts import MalformedText, quoted

_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "p": 1000**5,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
    "pi": 1 << 50,
}

FLOAT32_BYTES = 4
GRAPH_BYTES = 2 << 20
"""Size of a graph's nodes, without weights."""
_PROGRAM_BYTES = 4 << 20
"""Size of a program's instructions, without weights."""


def parse_size(text: str) -> int:
    """Parse a size in bytes, such as ``8589934592``, ``8GiB`` or ``8G``.

    Raises:
        MalformedText: The text is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*([kmgtp]i?)?b?\s*", text.lower())
    if match is None:
        raise MalformedText(f"{quoted(text)} is not a size", remedy="write it like 8GiB or 8589934592")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def format_size(count: float) -> str:
    """Format bytes for people: ``1.4 GB`` (powers of 1000, as on disks and downloads)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def parse_size_or_share(text: str) -> int | float:
    """Parse a size such as ``400MiB``, an int of at least 1, or a share such as ``0.3`` or ``30%``, a float above 0 and at most 1.

    Raises:
        MalformedText: The text is neither.
    """
    match = re.fullmatch(r"\s*([0-9]{0,9}\.[0-9]{1,24}|[0-9]{1,9}(?:\.[0-9]{1,24})?\s*(%))\s*", text)
    if match:
        share = float(match[1].rstrip("% ")) / (100 if match[2] else 1)
        if 0 < share <= 1:
            return share
    else:
        with contextlib.suppress(MalformedText):
            if size := parse_size(text):
                return size
    raise MalformedText(
        f"{quoted(text)} is neither a size nor a share", remedy="write a size like 400MiB, or a share like 0.3 or 30%"
    )


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model.

    Attributes:
        weights: Number of weights.
        weight_bytes: Size of the weights on disk.
        largest: Number of weights in the largest tensor.
        largest_bytes: Size of that tensor on disk.
        companion_bytes: Size of the configuration, tokenizer and other files.
    """

    weights: int
    weight_bytes: int
    largest: int
    largest_bytes: int
    companion_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Return the size of the model as stored."""
        return self.weight_bytes + self.companion_bytes

    @property
    def graph_bytes(self) -> int:
        """Return the size of the model as a graph in float32."""
        return self.weights * FLOAT32_BYTES + self.companion_bytes + GRAPH_BYTES

    def at_level(self, level: str) -> int:
        """Return the size of the model at a level, with its other files; an unknown level counts as float32."""
        return self._at_level(level, self.weights)

    def program_bytes(self, level: str) -> int:
        """Return an upper bound of the size at a level as a program, which stores a matrix that is tied to the embedding twice."""
        return self._at_level(level, self.weights + self.largest) + _PROGRAM_BYTES

    def _at_level(self, level: str, weights: int) -> int:
        each = LEVELS[level].bytes_per_weight if level in LEVELS else FLOAT32_BYTES
        return int(weights * each) + self.companion_bytes
