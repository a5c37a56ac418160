"""Makers of a tiny model for each architecture that is written as GGUF. Data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import transformers as tf

from support.models.gguf_dense import DENSE
from support.models.gguf_mixtures import LLAMA_4, MIXTURES
from support.models.gguf_sizes import LINEAR, LLAMA3, SIZES, VOCABULARY, YARN, longrope, of

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


_ROUTED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_LATENT: dict[str, Any] = {
    "n_group": 4,
    "topk_group": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SHARED_EXPERT: dict[str, Any] = {**_EXPERTS, "shared_expert_intermediate_size": 48}
_CONVOLUTION: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
_NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 32,
    "time_step_min": 1e-7,  # transformers makes shorter steps as long as this, and llama.cpp does not
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
}


def _gpt2() -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def _gemma(layers: int, period: int) -> dict[str, Any]:
    kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "sliding_window": 16,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
    }


_MINISTRAL_ROPE = {
    **YARN,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_LLAMA_4_VISION = {
    **{key: value for key, value in _SIGLIP.items() if key != "intermediate_size"},
    "intermediate_size": 128,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}
_PIXTRAL = {**_SIGLIP, "model_type": "pixtral"}


def _parts(name: str, text: dict[str, Any], vision: dict[str, Any] | None) -> Callable[[], Any]:
    """Return a function that makes a model with parts for text and images."""

    def make() -> Any:
        config = getattr(tf, f"{name}Config")(text_config={**SIZES, **text}, vision_config=vision)
        return getattr(tf, f"{name}ForConditionalGeneration")(config)

    return make


_GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 16,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": of("Qwen3Config", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=True),
    "qwen3-yarn": of("Qwen3Config", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=False, rope_parameters=YARN),
    "qwen2": of("Qwen2Config", "Qwen2ForCausalLM", tie_word_embeddings=False),
    "qwen2moe": of("Qwen2MoeConfig", "Qwen2MoeForCausalLM", **_EXPERTS, shared_expert_intermediate_size=64),
    "qwen3moe": of("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **_EXPERTS, head_dim=32, norm_topk_prob=True),
    "llama": of("LlamaConfig", "LlamaForCausalLM"),
    "llama3": of("LlamaConfig", "LlamaForCausalLM", rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama-linear-bias": of(
        "LlamaConfig", "LlamaForCausalLM", rope_parameters=LINEAR, attention_bias=True, mlp_bias=True
    ),
    "mistral": of("MistralConfig", "MistralForCausalLM", head_dim=32, sliding_window=None),
    "gemma2": of("Gemma2Config", "Gemma2ForCausalLM", **_gemma(4, 2)),
    "gemma3": of("Gemma3TextConfig", "Gemma3ForCausalLM", **_gemma(7, 6)),
    "phi3": of("Phi3Config", "Phi3ForCausalLM"),
    "phi3-long": of(
        "Phi3Config", "Phi3ForCausalLM", original_max_position_embeddings=16, rope_parameters=longrope(16, 16)
    ),
    # llama.cpp chooses by the length of its context.
    "phi3-short": of(
        "Phi3Config",
        "Phi3ForCausalLM",
        max_position_embeddings=1024,
        original_max_position_embeddings=512,
        rope_parameters=longrope(16, 512),
    ),
    "smollm3": of("SmolLM3Config", "SmolLM3ForCausalLM", num_hidden_layers=5, tie_word_embeddings=True),
    "granite": of("GraniteConfig", "GraniteForCausalLM", **_GRANITE),
    "granitemoe": of(
        "GraniteMoeConfig", "GraniteMoeForCausalLM", **_GRANITE, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt2": _gpt2,
    "qwen35": of("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", **_DELTA_NET, tie_word_embeddings=True),
    "qwen35moe": of("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", **_DELTA_NET, **_SHARED_EXPERT),
    "qwen3next": of("Qwen3NextConfig", "Qwen3NextForCausalLM", **_DELTA_NET, **_SHARED_EXPERT),
    "lfm2": of("Lfm2Config", "Lfm2ForCausalLM", **_CONVOLUTION, block_multiple_of=32),
    "lfm2moe": of(
        "Lfm2MoeConfig", "Lfm2MoeForCausalLM", **_CONVOLUTION, **_EXPERTS, num_dense_layers=1, use_expert_bias=True
    ),
    "granitehybrid": of(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        **_MAMBA,
        **_GRANITE,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        layer_types=["mamba", "attention", "mamba"],
        num_hidden_layers=3,
    ),
    "granitehybrid-dense": of(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        **_MAMBA,
        **_GRANITE,
        num_local_experts=0,
        shared_intermediate_size=80,
        position_embedding_type="rope",
        layer_types=["mamba", "attention", "mamba"],
        num_hidden_layers=3,
    ),
    "granite-4-attention": of(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        **_GRANITE,
        num_local_experts=0,
        shared_intermediate_size=80,
        layer_types=["attention"] * 2,
        tie_word_embeddings=True,
    ),
    "granite-4-attention-experts": of(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        **_GRANITE,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        position_embedding_type="rope",
        layer_types=["attention"] * 2,
    ),
    "nemotron_h": of("NemotronHConfig", "NemotronHForCausalLM", **_NEMOTRON, hybrid_override_pattern="M-*M-"),
    "nemotron_h_moe": of(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        **_NEMOTRON,
        hybrid_override_pattern="ME*ME",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        routed_scaling_factor=1.5,
    ),
    "mixtral": of(
        "MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "olmoe": of("OlmoeConfig", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, num_key_value_heads=4),
    "mistral3": of(
        "Ministral3Config",
        "Ministral3ForCausalLM",
        head_dim=32,
        rope_parameters=_MINISTRAL_ROPE,
    ),
    "gemma4": of("Gemma4TextConfig", "Gemma4ForCausalLM", **_GEMMA_4, num_kv_shared_layers=2, use_double_wide_mlp=True),
    "gemma4-experts": of(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        **_GEMMA_4 | {"hidden_size_per_layer_input": 0},
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=5.0,
    ),
    "gemma3n": of(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        num_hidden_layers=25,
        num_kv_shared_layers=5,
        head_dim=16,
        intermediate_size=384,
        sliding_window=16,
        vocab_size_per_layer_input=VOCABULARY - 20,
        hidden_size_per_layer_input=256,
    ),
    "gemma4-text-part": _parts("Gemma4", {**_GEMMA_4, "num_kv_shared_layers": 2, "pad_token_id": 0}, None),
    "qwen35-text-part": _parts(
        "Qwen3_5",
        {**_DELTA_NET, "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}},
        _QWEN_VISION,
    ),
    "qwen3vl": _parts(
        "Qwen3VL",
        {"head_dim": 32, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5]}},
        {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3vlmoe": _parts(
        "Qwen3VLMoe",
        {**_EXPERTS, "head_dim": 32, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5]}},
        {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen2vl": _parts(
        "Qwen2_5_VL", {"rms_norm_eps": 1e-12, "rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}}, _QWEN_VISION
    ),
    "llama4-text-part": _parts("Llama4", LLAMA_4, _LLAMA_4_VISION),
    "gemma3-text-part": _parts("Gemma3", _gemma(7, 6), _SIGLIP),
    "mistral3-text-part": _parts(
        "Mistral3", {"model_type": "ministral3", "head_dim": 32, "rope_parameters": _MINISTRAL_ROPE}, _PIXTRAL
    ),
    "glm4moe": of("Glm4MoeConfig", "Glm4MoeForCausalLM", **_ROUTED, head_dim=32, use_qk_norm=True, attention_bias=True),
    "gpt-oss": of(
        "GptOssConfig",
        "GptOssForCausalLM",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        sliding_window=16,
        num_hidden_layers=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "gpt-oss-yarn": of(
        "GptOssConfig",
        "GptOssForCausalLM",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        sliding_window=16,
        num_hidden_layers=4,
        rope_parameters={**YARN, "truncate": True},
    ),
    "deepseek2": of("DeepseekV3Config", "DeepseekV3ForCausalLM", **_ROUTED, **_LATENT),
    "deepseek2-yarn": of(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        **_ROUTED,
        **_LATENT,
        rope_parameters={**YARN, "mscale": 0.8, "mscale_all_dim": 0.8},
    ),
    "falcon-h1": of(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        **_MAMBA,
        mamba_d_ssm=128,
        head_dim=32,
        key_multiplier=0.7,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.9,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.8,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        mlp_multipliers=[0.8, 1.25],
        embedding_multiplier=5.0,
        lm_head_multiplier=0.6,
    ),
    **DENSE,
    **MIXTURES,
}


_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_LATENT_LAYERS = ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")
_OTHER_PARTS = ("visual", "vision_tower", "multi_modal_projector")
UNTRAINED: dict[str, tuple[str, ...]] = {
    # peft takes names that experts have too for their parameters.
    "qwen3next": _OF_EXPERTS,
    "glm4moe": _OF_EXPERTS,
    "dots1": _OF_EXPERTS,
    "ernie4_5-moe": _OF_EXPERTS,
    "deepseek-v2": (*_OF_EXPERTS, *_LATENT_LAYERS),
    **dict.fromkeys(
        ("deepseek-v2-direct", "deepseek-v2-lite", "deepseek-v3-direct"), (*_OF_EXPERTS, *_LATENT_LAYERS, "q_proj")
    ),
    "llama4": _OF_EXPERTS,
    "llama4-experts": _OF_EXPERTS,
    "hunyuan-moe": _OF_EXPERTS,
    # llama.cpp computes latent vectors without factors.
    "youtu": _LATENT_LAYERS,
    "minicpm3": _LATENT_LAYERS,
    "minicpm3-long": _LATENT_LAYERS,
    "deepseek2": (*_OF_EXPERTS, *_LATENT_LAYERS),
    "deepseek2-yarn": (*_OF_EXPERTS, *_LATENT_LAYERS),
    # peft refuses it for recurrent layers.
    "falcon-h1": ("out_proj",),
    "mamba": ("out_proj", "dt_proj"),  # transformers multiplies by the second's weight without its factors
    "mamba2": ("out_proj",),
    "jamba": (*_OF_EXPERTS, "out_proj", "dt_proj"),
    "jamba-dense": ("out_proj", "dt_proj"),
    "nemotron_h": ("out_proj",),
    "nemotron_h_moe": ("out_proj",),
    # llama.cpp computes it without factors.
    "gemma4": ("per_layer_model_projection",),
    "gemma4-text-part": ("per_layer_model_projection",),
    "gemma3n": ("per_layer_model_projection", "modality_router", "altup_projections", "altup_unembed"),
    "llama4-text-part": (*_OF_EXPERTS, *_OTHER_PARTS, "vision_model"),
    **dict.fromkeys(
        (
            "qwen35-text-part",
            "qwen3vl",
            "qwen3vlmoe",
            "qwen2vl",
            "gemma3-text-part",
            "mistral3-text-part",
        ),
        _OTHER_PARTS,
    ),
}
"""Parts of the names of layers that an adapter of a family leaves alone."""


@cache
def settings_of(family: str) -> dict[str, Any]:
    """Return what ``config.json`` says of a family's model."""
    made = FAMILIES[family]()
    return {**made.config.to_dict(), "architectures": [type(made).__name__]}
