"""The settings of plain decoders in ``config.json``, and the kinds of values that their classes in transformers take. Imports no libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipway.model.dtypes import DTYPES

TYPES = {DTYPES[name].torch: name for name in ("F32", "F16", "BF16")}
"""Names of types in a safetensors header, by those in ``config.json``."""
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def are_usual(settings: Mapping[str, Any]) -> bool:
    """Return whether all settings are of this module's table, with values of the right kinds: only the model's code can judge others."""
    return all(name in _KINDS and _KINDS[name](value) for name, value in settings.items())


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _or_none(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or kind(value)


def _is_token(value: object) -> bool:
    return value is None or all(map(_is_whole, value if isinstance(value, list) else [value]))


def _is_type(value: object) -> bool:
    return isinstance(value, str) and value in TYPES


def _is_rope(value: object) -> bool:
    """Return whether settings of positions are plain values by name, for all layers or for each kind of them."""
    if not isinstance(value, dict):
        return value is None
    parts = [part.values() if isinstance(part, dict) else [part] for part in value.values()]
    return not any(isinstance(each, list | dict) for part in parts for each in part)


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("_name_or_path", "model_type", "transformers_version"), _is_text),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_cache", "use_sliding_window"), _is_flag),
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "max_position_embeddings", "max_window_layers"),
            *("no_rope_layer_interval", "pretraining_tp", "_sliding_window_pattern"),
        ),
        _is_whole,
    ),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _is_token),
    **dict.fromkeys(
        (
            *("attention_dropout", "attention_multiplier", "embedding_multiplier", "initializer_range"),
            *("logits_scaling", "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps"),
            *("rope_theta", "rope_local_base_freq"),
        ),
        _is_number,
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _or_none(_is_number)),
    **dict.fromkeys(("hidden_act", "hidden_activation"), lambda value: value in _ACTIVATIONS),
    **dict.fromkeys(("dtype", "torch_dtype"), _or_none(_is_type)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _is_rope),
    "architectures": lambda value: isinstance(value, list),
    "layer_types": lambda value: isinstance(value, list) and all(each in _LAYER_TYPES for each in value),
    "no_rope_layers": lambda value: isinstance(value, list) and all(map(_is_whole, value)),
    "sliding_window": _or_none(_is_whole),
    "use_bidirectional_attention": _or_none(_is_flag),
}
