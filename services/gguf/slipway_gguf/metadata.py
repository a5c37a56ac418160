"""One key of a GGUF file's metadata, and our own key for the kinds of text that llama.cpp is known to read otherwise.

Validation tells these kinds of text from a fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

DIFFERS = "slipway.tokenizer.differs"
BETWEEN = "; "
"""Separator between kinds of text (``slipway.validation.texts.TextKind``)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One key of the metadata.

    Attributes:
        key: Name of the key, such as ``general.name``.
        value: Its value; a sequence for an array.
        kind: Type of the value.
        item: Type of an array's elements; None for anything else.
    """

    key: str
    value: Any
    kind: gguf.GGUFValueType
    item: gguf.GGUFValueType | None = None
