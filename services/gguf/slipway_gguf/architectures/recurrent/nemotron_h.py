"""Nemotron-H, whose layers have one part each: Mamba-2, attention, a feed-forward network or experts. Data, and light.

Sources: llama.cpp's ``conversion/nemotron.py`` and ``src/models/nemotron-h.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass
from slipway_gguf.architectures.entry import (
    Architecture,
    Heads,
    Key,
    Numbers,
    Target,
    kv_heads_by_layer,
)
from slipway_gguf.architectures.recurrent.mamba_2 import mamba_2_layer
from slipway_gguf.architectures.refusals import (
    dense_layers_beside_experts,
    first_of,
    lengthened_steps,
    limited_steps,
)
from slipway_gguf.architectures.settings import ROUTED_EXPERTS, SIGMOID, Assumed


def _nemotron_layers(setting: str, kind: str) -> Key:
    """Return a width in layers of a kind, each of which has nothing but what its kind says, and 0 in others."""
    return lambda numbers: numbers.by_kind(kind, numbers.whole(setting))


def _state_sizes(numbers: Numbers) -> int:
    return numbers.whole("mamba_num_heads") * numbers.whole("mamba_head_dim")


_NEMOTRON: Mapping[str, tuple[Target, ...]] = mamba_2_layer("mixer", "n_groups")
_NEMOTRON_EXPERTS: Mapping[str, tuple[Target, ...]] = {
    **_NEMOTRON,
    "mixer.gate.weight": (Target("ffn_gate_inp.weight"),),
    "mixer.gate.e_score_correction_bias": (Target("exp_probs_b.bias"),),
    "mixer.experts.up_proj.weight": (Target("ffn_up_exps.weight"),),
    "mixer.experts.down_proj.weight": (Target("ffn_down_exps.weight"),),
    "mixer.experts.up_proj": (Target("ffn_up_exps.weight"),),
    "mixer.experts.down_proj": (Target("ffn_down_exps.weight"),),
    "mixer.shared_experts.up_proj.weight": (Target("ffn_up_shexp.weight"),),
    "mixer.shared_experts.down_proj.weight": (Target("ffn_down_shexp.weight"),),
}
_NEMOTRON_KEYS: Mapping[str, Key] = {
    "ssm.conv_kernel": lambda numbers: numbers.whole("conv_kernel"),
    "ssm.state_size": lambda numbers: numbers.whole("ssm_state_size"),
    "ssm.group_count": lambda numbers: numbers.whole("n_groups"),
    "ssm.time_step_rank": lambda numbers: numbers.whole("mamba_num_heads"),
    "ssm.inner_size": _state_sizes,
    "attention.layer_norm_rms_epsilon": lambda numbers: numbers.number("layer_norm_epsilon"),
    "attention.head_count_kv": kv_heads_by_layer,
}
_NEMOTRON_ASSUMES: Assumed = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "mamba_proj_bias": (False,),
    "use_bias": (False,),
    "use_conv_bias": (True,),
    "moe_latent_size": (),
    "n_group": (1,),
    "topk_group": (1,),
}


def _has_expert_layers(settings: Mapping[str, Any]) -> bool:
    kinds = settings.get("layers_block_type") or settings.get("layer_types")
    pattern = settings.get("hybrid_override_pattern")
    return "moe" in kinds if isinstance(kinds, list) else isinstance(pattern, str) and "E" in pattern


_NEMOTRON_H = DecoderClass(
    "NemotronHForCausalLM",
    {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    by_layer=True,
)

NEMOTRON_H: tuple[Architecture, ...] = (
    Architecture(
        "nemotron_h_moe",
        _NEMOTRON_H,
        when=_has_expert_layers,
        assumes=_NEMOTRON_ASSUMES,
        rope=(),
        experts=ROUTED_EXPERTS,
        tensors=_NEMOTRON_EXPERTS,
        keys={
            **_NEMOTRON_KEYS,
            "feed_forward_length": _nemotron_layers("moe_intermediate_size", "moe"),
            "expert_shared_feed_forward_length": lambda numbers: numbers.whole("moe_shared_expert_intermediate_size"),
            "expert_shared_count": lambda numbers: numbers.count("n_shared_experts"),
            "expert_weights_norm": lambda numbers: numbers.flag("norm_topk_prob"),
            "expert_weights_scale": lambda numbers: numbers.number("routed_scaling_factor"),
            "expert_gating_func": lambda _: SIGMOID,
        },
        refuses=first_of(limited_steps, lengthened_steps, dense_layers_beside_experts),
        heads=Heads(("mtp.",)),
        notes="layers of Mamba-2, attention or experts; widths by layer",
    ),
    Architecture(
        "nemotron_h",
        _NEMOTRON_H,
        assumes=_NEMOTRON_ASSUMES,
        rope=(),
        tensors=_NEMOTRON,
        keys={**_NEMOTRON_KEYS, "feed_forward_length": _nemotron_layers("intermediate_size", "mlp")},
        refuses=first_of(limited_steps, lengthened_steps),
        heads=Heads(("mtp.",)),
        notes="layers of Mamba-2, attention or feed-forward networks; widths by layer",
    ),
)
