"""The numbers of a model as keys of the metadata that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from slipway_gguf.architectures.rope import rope_of
from slipway_gguf.architectures.settings import optional_number, whole
from slipway_gguf.architectures.table import Architecture
from slipway_gguf.metadata import Field

_KIND = gguf.GGUFValueType
_LAYERS, _HEADS, _HIDDEN = (
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("hidden_size", "n_embd"),
)
_POSITIONS = ("max_position_embeddings", "n_positions")
_EXPERTS = ("num_local_experts", "num_experts")
_COUNTS = {
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Settings by key, each written if the model has it."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a model's ``config.json`` says of it.

    Attributes:
        architecture: The architecture.
        fields: Keys of the metadata.
        layers: Number of layers.
        heads: Number of attention heads.
        kv_heads: Number of heads of keys and values.
        width: Width of a head.
        experts: Number of experts; 0 for none.
        factors: Tensors of the rotary embedding by name.
        window: Positions beyond which a file's results would differ from the model's, because llama.cpp computes no sliding window
            for this architecture; 0 if there is no such limit.
    """

    architecture: Architecture
    fields: tuple[Field, ...]
    layers: int
    heads: int
    kv_heads: int
    width: int
    experts: int
    factors: Mapping[str, NDArray[np.float32]]
    window: int


def parameters_of(found: Architecture, config: Mapping[str, Any]) -> Parameters:
    """Return the numbers of a model.

    Args:
        found: Its architecture.
        config: Its ``config.json``.

    Raises:
        GGUFExportError: ``BASE_MODEL_INVALID`` for a wrong number, ``FAMILY_UNSUPPORTED`` for one that llama.cpp does not compute.
    """
    settings = found.settings(config)
    hidden, heads, layers = (whole(settings, *keys) for keys in (_HIDDEN, _HEADS, _LAYERS))
    kv_heads = whole(settings, "num_key_value_heads", default=heads)
    width = whole(settings, "head_dim", default=found.head_dim or max(1, hidden // heads))
    experts = whole(settings, *_EXPERTS) if "moe" in found.name else 0
    inner = whole(settings, "intermediate_size", "n_inner", default=4 * hidden)
    positions, window = whole(settings, *_POSITIONS), _uncomputed_window(found, settings)
    limit = window if 0 < window < positions else 0
    rope = rope_of(found, settings, width)
    whole_numbers = {
        "context_length": limit or positions,
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "vocab_size": whole(settings, "vocab_size"),
        **({"expert_count": experts} if experts else {}),
        **{key: whole(settings, name) for key, name in _COUNTS.items() if experts and settings.get(name) is not None},
        **_window_keys(found, settings),
    }
    numbers = {key: value for key, name in _NUMBERS.items() if (value := optional_number(settings, name)) is not None}
    fields = (
        *(Field(f"{found.name}.{key}", value, _KIND.UINT32) for key, value in whole_numbers.items()),
        *(Field(f"{found.name}.{key}", value, _KIND.FLOAT32) for key, value in numbers.items()),
        *rope.fields,
    )
    return Parameters(found, fields, layers, heads, kv_heads, width, experts, rope.tensors, limit)


def _window_keys(found: Architecture, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the keys of a sliding window; older versions of llama.cpp refuse Phi-3 without one, where 0 stands for none."""
    if found.windows:
        return {"attention.sliding_window": whole(settings, "sliding_window")}
    if found.name != "phi3":
        return {}
    window = settings.get("sliding_window")
    return {"attention.sliding_window": 0 if window is None else whole(settings, "sliding_window")}


def _uncomputed_window(found: Architecture, settings: Mapping[str, Any]) -> int:
    """Return the length of a sliding window that llama.cpp does not compute for this architecture; 0 for none."""
    window = settings.get("sliding_window")
    if found.windows or settings.get("use_sliding_window") is False or not isinstance(window, int):
        return 0
    by_default = found.classes[0] in ("MistralForCausalLM", "Phi3ForCausalLM")  # others need use_sliding_window
    return max(0, window) if by_default or settings.get("use_sliding_window") else 0
