"""Names that the stage writes and the runtime reads."""

from __future__ import annotations

PROGRAM, DESCRIPTION = "model.tflite", "litert.json"
PREFILL, DECODE = "prefill", "decode"
"""Signatures of a decoder: several tokens in a call, and one."""
TOKENS, PLACES, LOGITS = "tokens", "input_pos", "logits"
KEYS, VALUES = "kv_cache_k_", "kv_cache_v_"
"""Inputs and outputs of a decoder; the number of a layer follows the last two. LiteRT's own language models have these names."""
TEXT = "text_"
"""Signatures of a model that reads a whole text; the number of places follows."""
_SHORTEST, _FACTOR = 32, 4


def text_lengths(longest: int) -> tuple[int, ...]:
    """Return the numbers of places of the signatures of an encoder: a short text should not cost as much as the longest."""
    lengths, length = [], _SHORTEST
    while length < longest:
        lengths.append(length)
        length *= _FACTOR
    return (*lengths, longest)
