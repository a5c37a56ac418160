"""The comparison of what a runtime reads of a text and of a conversation with what transformers reads."""

from __future__ import annotations

from enum import StrEnum

from slipway.validation.values import Value


class TextKind(StrEnum):
    """Kind of a text that is hard to split into tokens. An output may name kinds that its runtime is known to split otherwise."""

    WORDS = "words"
    DIGITS = "digits"
    CODE = "code"
    CJK = "CJK"
    EMOJI = "emoji"
    LEADING = "a space at the begin"
    SPACES = "runs of spaces"
    CASED = "letters of two cases"
    MARKS = "marks on letters"
    DECOMPOSED = "letters apart from their marks"
    SPECIAL = "special tokens"
    SPECIAL_SPACES = "spaces beside special tokens"
    LONG = "long words"


class TextComparison(Value):
    """What a runtime reads with the tokenizer and chat template of an output, compared with transformers.

    Attributes:
        texts: Number of texts that were split into tokens.
        different: Number of them with other tokens.
        excused: Number of further ones of kinds that the runtime is known to split otherwise.
        excused_kinds: These kinds.
        first_difference: The first text with other tokens, and both readings.
        conversations: Number of conversations that were rendered.
        rendered_otherwise: Number of them with another result.
        first_rendered: The first of them, and both results.
        template_missing: Whether the output has no chat template though the model has one.
        not_compared: Why nothing was compared; empty otherwise.
    """

    texts: int = 0
    different: int = 0
    excused: int = 0
    excused_kinds: tuple[str, ...] = ()
    first_difference: str = ""
    conversations: int = 0
    rendered_otherwise: int = 0
    first_rendered: str = ""
    template_missing: bool = False
    not_compared: str = ""
