"""The numbers of a model as keys of the metadata that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from slipway.model.configuration import ModelConfig
from slipway.model.decoders.decoder import Decoder, decoder_of
from slipway_gguf.architectures.rope import rope_of
from slipway_gguf.architectures.settings import VALUES, optional_number, whole
from slipway_gguf.architectures.table import Architecture
from slipway_gguf.metadata import Field

_KIND = gguf.GGUFValueType
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
        decoder: The model's sizes.
        fields: Keys of the metadata.
        experts: Number of experts; 0 for none.
        factors: Tensors of the rotary embedding by name.
        window: Positions beyond which a file's results would differ from the model's, because llama.cpp computes no sliding window
            for this architecture; 0 if there is no such limit.
    """

    architecture: Architecture
    decoder: Decoder
    fields: tuple[Field, ...]
    experts: int
    factors: Mapping[str, NDArray[np.float32]]
    window: int


def parameters_of(found: Architecture, config: ModelConfig) -> Parameters:
    """Return the numbers of a model.

    Args:
        found: Its architecture.
        config: Its ``config.json``.

    Raises:
        GGUFExportError: ``BASE_MODEL_INVALID`` for a wrong number, ``FAMILY_UNSUPPORTED`` for one that llama.cpp does not compute.
    """
    decoder = decoder_of(config, VALUES)
    settings = decoder.settings
    experts = whole(settings, *_EXPERTS) if "moe" in found.name else 0
    limit = 0 if found.has_windows else min(decoder.windows, default=0)
    rope = rope_of(found, decoder)
    whole_numbers = {
        "context_length": limit or decoder.positions,
        "embedding_length": decoder.hidden,
        "block_count": decoder.layers,
        "feed_forward_length": decoder.inner,
        "attention.head_count": decoder.heads,
        "attention.head_count_kv": decoder.kv_heads,
        "attention.key_length": decoder.width,
        "attention.value_length": decoder.width,
        "vocab_size": decoder.vocabulary,
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
    return Parameters(found, decoder, fields, experts, rope.tensors, limit)


def _window_keys(found: Architecture, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the keys of a sliding window; older versions of llama.cpp refuse Phi-3 without one, where 0 stands for none."""
    if found.has_windows:
        return {"attention.sliding_window": whole(settings, "sliding_window")}
    if found.name != "phi3":
        return {}
    window = settings.get("sliding_window")
    return {"attention.sliding_window": 0 if window is None else whole(settings, "sliding_window")}
