"""Find out from a configuration how far the attention of a model's local layers looks."""

from __future__ import annotations

from typing import Any

_LOCAL = ("sliding_attention", "chunked_attention", "local")


def window_of(config: Any) -> int:
    """Return the tokens that local layers attend to, 0 if all layers have full attention.

    A text that is longer by some tokens shows whether a graph keeps to the window. Models name it differently: ``sliding_window``;
    ``attention_chunk_size`` (Llama 4); ``window_size`` (GPT-Neo); ``local_attention``, half of it on each side (ModernBERT, whose
    ``sliding_window`` is that half); ``attention_window`` of each layer (Longformer, LED); ``local_radius`` on each side (LongT5).
    BigBird leaves full attention where a text is longer than five blocks and the random ones on both sides.
    """
    if getattr(config, "attention_type", None) == "block_sparse":
        return int((5 + 2 * config.num_random_blocks) * config.block_size)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds and not set(kinds) & set(_LOCAL):
        return 0
    names = ["sliding_window", "attention_window", "local_radius"]
    if kinds and "chunked_attention" in kinds:
        names.append("attention_chunk_size")
    if kinds and "local" in kinds:
        names.append("window_size")
    return max((_tokens(getattr(config, name, None)) for name in names), default=0)


def _tokens(value: Any) -> int:
    sizes = value if isinstance(value, (list, tuple)) else [value]
    return max((size for size in sizes if isinstance(size, int) and not isinstance(size, bool)), default=0)
