"""Parameters of the litert stage, and the names that it writes and the runtime reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.stage import StageParams

PRODUCT = "LiteRT program"
"""What the format makes, in messages."""

LEVEL = "int8"
"""Integers of 8 bits for weights, a scale for each row; inputs of products are rounded while the program runs."""

PROGRAM, DESCRIPTION = "model.tflite", "litert.json"
PREFILL, DECODE = "prefill", "decode"
"""Signatures of a decoder: several tokens in a call, and one."""
TOKENS, PLACES, LOGITS = "tokens", "input_pos", "logits"
KEYS, VALUES = "kv_cache_k_", "kv_cache_v_"
"""Inputs and outputs of a decoder; a layer's number follows the last two. LiteRT's own language models use these names."""
TEXT = "text_"
"""Prefix of the signatures of a model that reads a whole text; the number of positions follows."""
_SHORTEST, _FACTOR = 32, 4


class LitertParams(StageParams):
    """Parameters of the litert stage."""

    level: Literal["none", "int8"] = Field(
        default="none",
        description="none keeps float32; int8 rounds weights to 8 bits, and inputs of products while the program runs",
    )
    max_length: int = Field(
        default=1024,
        ge=2,
        le=1 << 20,
        description="most tokens of a text: the size of a decoder's KV cache. A model of fewer positions takes as many as it has",
    )
    call_length: int = Field(
        default=128, ge=2, le=1 << 20, description="tokens that a decoder's prefill takes in one call"
    )


def text_lengths(longest: int) -> tuple[int, ...]:
    """Return the lengths of an encoder's signatures: several, so that a short text costs less than the longest."""
    lengths, length = [], _SHORTEST
    while length < longest:
        lengths.append(length)
        length *= _FACTOR
    return (*lengths, longest)
