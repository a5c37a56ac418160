"""Architectures with attention in all layers, RMS norms and no experts, but for Gemma and those with latent keys. Data, and light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.classes import CLASSES
from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed
from slipway_gguf.architectures.entry import Architecture, Key, local_layers, rope_number
from slipway_gguf.architectures.refusals import (
    EXAONE_LAYERS,
    first_of,
    largest_without_windows,
    other_local_base,
    other_rotation,
    other_scale_of_yarn,
    other_width,
    unlisted_windows,
    without_yarn,
)
from slipway_gguf.architectures.settings import GRANITE_DEFAULTS, SILU, SILU_WITHOUT_BIAS, UNTIED

_LLAMA_SCALINGS = ("linear", "yarn", "llama3")

_MINISTRAL_KEYS: Mapping[str, Key] = {
    "rope.scaling.yarn_log_multiplier": lambda numbers: rope_number(numbers, "mscale_all_dim"),
    "attention.temperature_scale": lambda numbers: rope_number(numbers, "llama_4_scaling_beta"),
}
_LLAMA_2_DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_GLM_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
}
_EXAONE_4 = DecoderClass(
    "Exaone4ForCausalLM",
    {**_LLAMA_2_DEFAULTS, "num_key_value_heads": 32, "sliding_window": 4096},
    windowed=Windowed.ALWAYS,
    local=Local.PERIOD,
    period=4,
)

DENSE: tuple[Architecture, ...] = (
    Architecture(
        "llama",
        CLASSES["LlamaForCausalLM"],
        assumes=SILU,
        rope=_LLAMA_SCALINGS,
        paired=True,
        wholes={"SmolVLMForConditionalGeneration": "llama", "Idefics3ForConditionalGeneration": "llama"},
    ),
    Architecture(
        "llama",
        CLASSES["MistralForCausalLM"],
        assumes=SILU,
        rope=_LLAMA_SCALINGS,
        paired=True,
        wholes={"Mistral3ForConditionalGeneration": "mistral"},
    ),
    Architecture(
        "mistral3",
        DecoderClass(
            "Ministral3ForCausalLM",
            {
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 262144,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
            },
            windowed=Windowed.ALWAYS,
        ),
        assumes=SILU,
        rope=("yarn",),
        paired=True,
        scales_yarn=True,
        keys=_MINISTRAL_KEYS,
        refuses=first_of(without_yarn, other_scale_of_yarn),
        notes="attention grows with the position",
        wholes={"Mistral3ForConditionalGeneration": "ministral3"},
    ),
    Architecture(
        "qwen2", CLASSES["Qwen2ForCausalLM"], assumes=SILU, wholes={"InternVLForConditionalGeneration": "qwen2"}
    ),
    Architecture(
        "qwen3",
        CLASSES["Qwen3ForCausalLM"],
        assumes=SILU_WITHOUT_BIAS,
        wholes={"InternVLForConditionalGeneration": "qwen3"},
    ),
    Architecture(
        "granite",
        DecoderClass("GraniteForCausalLM", GRANITE_DEFAULTS),
        assumes=SILU,
        paired=True,
        notes="scales of embedding, attention, residual and logits",
    ),
    Architecture(
        "olmo2",
        DecoderClass("Olmo2ForCausalLM", _LLAMA_2_DEFAULTS),
        assumes={**SILU_WITHOUT_BIAS, **UNTIED},
        refuses=other_width,
    ),
    Architecture(
        "olmo2",
        DecoderClass(
            "Olmo3ForCausalLM",
            {**_LLAMA_2_DEFAULTS, "rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0, "sliding_window": 4096},
            windowed=Windowed.ALWAYS,
            local=Local.PERIOD,
            period=4,
        ),
        assumes={**SILU_WITHOUT_BIAS, **UNTIED},
        has_windows=True,
        keys={"attention.sliding_window_pattern": local_layers},
        refuses=first_of(other_width, unlisted_windows, other_local_base),
        notes="rope scaling in layers without a window",
    ),
    Architecture("phi3", CLASSES["Phi3ForCausalLM"], assumes=SILU, rope=("longrope",), partial=True),
    Architecture(
        "chatglm", DecoderClass("GlmForCausalLM", _GLM_DEFAULTS), assumes=SILU, partial=True, refuses=other_width
    ),
    Architecture("glm4", DecoderClass("Glm4ForCausalLM", _GLM_DEFAULTS), assumes=SILU, partial=True),
    Architecture(
        "ernie4_5",
        DecoderClass(
            "Ernie4_5ForCausalLM",
            {
                "num_key_value_heads": 2,
                "head_dim": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "tie_word_embeddings": True,
            },
        ),
        assumes={**SILU, "use_bias": (False,)},
    ),
    Architecture(
        "exaone4",
        _EXAONE_4,
        when=lambda settings: settings.get("sliding_window") is None,
        assumes=SILU,
        rope=_LLAMA_SCALINGS,
        refuses=first_of(other_width, largest_without_windows),
    ),
    Architecture(
        "exaone4",
        _EXAONE_4,
        assumes={**SILU, "num_hidden_layers": (EXAONE_LAYERS,)},
        rope=_LLAMA_SCALINGS,
        has_windows=True,
        keys={"attention.sliding_window_pattern": local_layers},
        refuses=first_of(other_width, unlisted_windows),
        notes="64 layers, and no other number of them",
    ),
    Architecture(
        "hunyuan-dense",
        DecoderClass("HunYuanDenseV1ForCausalLM", _LLAMA_2_DEFAULTS),
        assumes=SILU_WITHOUT_BIAS,
        rope=("dynamic",),
        notes="with an `alpha`, which stretches the base",
    ),
    Architecture(
        "seed_oss",
        DecoderClass(
            "SeedOssForCausalLM",
            {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6},
        ),
        assumes={**SILU, "attention_out_bias": (False,), "mlp_bias": (False,)},
    ),
    Architecture(
        "smollm3",
        DecoderClass(
            "SmolLM3ForCausalLM",
            {
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "rope_theta": 2_000_000.0,
                "tie_word_embeddings": True,
                "no_rope_layer_interval": 4,
            },
            windowed=Windowed.ASKED,
            local=Local.UNROTATED,
        ),
        assumes={**SILU, "no_rope_layer_interval": (4,)},
        paired=True,
        refuses=other_rotation,
    ),
    Architecture(
        "arcee",
        DecoderClass("ArceeForCausalLM", {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
        assumes={"hidden_act": ("relu2",), "attention_bias": (False,), "mlp_bias": (False,)},
        rope=_LLAMA_SCALINGS,
        paired=True,
    ),
    Architecture(
        "apertus",
        DecoderClass(
            "ApertusForCausalLM", {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0}
        ),
        assumes={"hidden_act": ("xielu",), "attention_bias": (False,)},
        rope=_LLAMA_SCALINGS,
        scalars={f"mlp.act_fn.{each}": f"xielu.{each}" for each in ("alpha_n", "alpha_p", "beta", "eps")},
        notes="numbers of the activation from tensors",
    ),
)
