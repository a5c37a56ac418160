"""Architectures with attention in all layers, RMS norms and no experts, but for Gemma. Data, and light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slipway_gguf.architectures.entry import Architecture, Key, local_layers, rope_number
from slipway_gguf.architectures.mixtures import MIXTURES
from slipway_gguf.architectures.refusals import (
    EXAONE_LAYERS,
    first_of,
    largest_without_windows,
    other_local_base,
    other_minicpm,
    other_rotation,
    other_scale_of_yarn,
    other_width,
    unlisted_windows,
    without_yarn,
)
from slipway_gguf.architectures.settings import SILU, SILU_WITHOUT_BIAS, UNTIED

_LLAMA_SCALINGS = ("linear", "yarn", "llama3")

_MINISTRAL_KEYS: Mapping[str, Key] = {
    "rope.scaling.yarn_log_multiplier": lambda numbers: rope_number(numbers, "mscale_all_dim"),
    "attention.temperature_scale": lambda numbers: rope_number(numbers, "llama_4_scaling_beta"),
}

_LATENT_KEYS: Mapping[str, Key] = {
    "attention.q_lora_rank": lambda numbers: numbers.whole("q_lora_rank"),
    "attention.kv_lora_rank": lambda numbers: numbers.whole("kv_lora_rank"),
    "attention.key_length": lambda numbers: numbers.whole("qk_nope_head_dim") + numbers.whole("qk_rope_head_dim"),
    "attention.value_length": lambda numbers: numbers.whole(
        "v_head_dim", default=max(1, numbers.decoder.hidden // numbers.decoder.heads)
    ),
}
_DEEPSEEK = next(each for each in MIXTURES if each.class_name == "DeepseekV3ForCausalLM")
_YOUTU_KEYS: Mapping[str, Key] = {
    **{key: value for key, value in _DEEPSEEK.keys.items() if not key.startswith("expert_")},
    "leading_dense_block_count": lambda numbers: numbers.decoder.layers,
    "expert_feed_forward_length": lambda numbers: numbers.decoder.inner,
    "expert_shared_count": lambda _: 0,
}
"""The graph of DeepSeek, with no layer that has experts; llama.cpp wants numbers for them all the same."""

DENSE: tuple[Architecture, ...] = (
    Architecture("llama", "LlamaForCausalLM", assumes=SILU, rope=_LLAMA_SCALINGS, paired=True),
    Architecture("llama", "MistralForCausalLM", assumes=SILU, rope=_LLAMA_SCALINGS, paired=True),
    Architecture(
        "mistral3",
        "Ministral3ForCausalLM",
        assumes=SILU,
        rope=("yarn",),
        paired=True,
        scales_yarn=True,
        keys=_MINISTRAL_KEYS,
        refuses=first_of(without_yarn, other_scale_of_yarn),
    ),
    Architecture("qwen2", "Qwen2ForCausalLM", assumes=SILU),
    Architecture("qwen3", "Qwen3ForCausalLM", assumes=SILU_WITHOUT_BIAS),
    Architecture("granite", "GraniteForCausalLM", assumes=SILU, paired=True),
    Architecture("olmo2", "Olmo2ForCausalLM", assumes={**SILU_WITHOUT_BIAS, **UNTIED}, refuses=other_width),
    Architecture(
        "olmo2",
        "Olmo3ForCausalLM",
        assumes={**SILU_WITHOUT_BIAS, **UNTIED},
        has_windows=True,
        keys={"attention.sliding_window_pattern": local_layers},
        refuses=first_of(other_width, unlisted_windows, other_local_base),
    ),
    Architecture("phi3", "Phi3ForCausalLM", assumes=SILU, rope=("longrope",), partial=True),
    Architecture("chatglm", "GlmForCausalLM", assumes=SILU, partial=True, refuses=other_width),
    Architecture("glm4", "Glm4ForCausalLM", assumes=SILU, partial=True),
    Architecture("ernie4_5", "Ernie4_5ForCausalLM", assumes={**SILU, "use_bias": (False,)}),
    Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        when=lambda settings: settings.get("sliding_window") is None,
        assumes=SILU,
        rope=_LLAMA_SCALINGS,
        refuses=first_of(other_width, largest_without_windows),
    ),
    Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        assumes={**SILU, "num_hidden_layers": (EXAONE_LAYERS,)},
        rope=_LLAMA_SCALINGS,
        has_windows=True,
        keys={"attention.sliding_window_pattern": local_layers},
        refuses=first_of(other_width, unlisted_windows),
    ),
    Architecture("hunyuan-dense", "HunYuanDenseV1ForCausalLM", assumes=SILU_WITHOUT_BIAS, rope=("dynamic",)),
    Architecture(
        "seed_oss", "SeedOssForCausalLM", assumes={**SILU, "attention_out_bias": (False,), "mlp_bias": (False,)}
    ),
    Architecture(
        "smollm3",
        "SmolLM3ForCausalLM",
        assumes={**SILU, "no_rope_layer_interval": (4,)},
        paired=True,
        refuses=other_rotation,
    ),
    Architecture(
        "arcee",
        "ArceeForCausalLM",
        assumes={"hidden_act": ("relu2",), "attention_bias": (False,), "mlp_bias": (False,)},
        rope=_LLAMA_SCALINGS,
        paired=True,
    ),
    Architecture(
        "apertus",
        "ApertusForCausalLM",
        assumes={"hidden_act": ("xielu",), "attention_bias": (False,)},
        rope=_LLAMA_SCALINGS,
        scalars={f"mlp.act_fn.{each}": f"xielu.{each}" for each in ("alpha_n", "alpha_p", "beta", "eps")},
    ),
    Architecture(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        assumes={**SILU_WITHOUT_BIAS, "scale_emb": (12,), "scale_depth": (1.4,), "dim_model_base": (256,)},
        rope=("longrope",),
        keys=_LATENT_KEYS,
        unadapted=(".attn_q_a.weight", ".attn_q_b.weight", ".attn_kv_a_mqa.weight", ".attn_kv_b.weight"),
        refuses=other_minicpm,
    ),
    replace(_DEEPSEEK, class_name="YoutuForCausalLM", experts=(), dense="", keys=_YOUTU_KEYS, heads=None),
)
"""In the order in which they are named to users."""
