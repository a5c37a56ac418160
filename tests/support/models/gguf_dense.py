"""Makers of a tiny model for decoders with attention in all layers and no experts, and for the family of Gemma. Data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from support.models.gguf_sizes import GRANITE, LINEAR, LLAMA3, VOCABULARY, YARN, longrope, of

MINISTRAL_ROPE = {
    **YARN,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 16,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
_KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
_WINDOWS: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 16, "layer_types": _KINDS}


def _olmo3_rope(full: dict[str, Any]) -> dict[str, Any]:
    """Return a rotary embedding that is scaled in layers without a window."""
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": full["rope_theta"]}}


_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_WIDE = 512
"""llama.cpp divides the inputs of MiniCPM's head by a 256th of it."""


def _gpt2() -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def gemma(layers: int, period: int) -> dict[str, Any]:
    """Return settings of a Gemma whose layers have a window, but for the last one of each period."""
    kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "sliding_window": 16,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
    }


DENSE: dict[str, Callable[[], Any]] = {
    "llama": of("LlamaConfig", "LlamaForCausalLM"),
    "llama3": of("LlamaConfig", "LlamaForCausalLM", rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama-linear-bias": of(
        "LlamaConfig", "LlamaForCausalLM", rope_parameters=LINEAR, attention_bias=True, mlp_bias=True
    ),
    "mistral": of("MistralConfig", "MistralForCausalLM", head_dim=32, sliding_window=None),
    "mistral3": of(
        "Ministral3Config",
        "Ministral3ForCausalLM",
        head_dim=32,
        rope_parameters=MINISTRAL_ROPE,
    ),
    "qwen2": of("Qwen2Config", "Qwen2ForCausalLM", tie_word_embeddings=False),
    "qwen3": of("Qwen3Config", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=True),
    "qwen3-yarn": of("Qwen3Config", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=False, rope_parameters=YARN),
    "gemma": of("GemmaConfig", "GemmaForCausalLM", head_dim=32),
    "gemma2": of("Gemma2Config", "Gemma2ForCausalLM", **gemma(4, 2)),
    "gemma3": of("Gemma3TextConfig", "Gemma3ForCausalLM", **gemma(7, 6)),
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
    "gemma4": of("Gemma4TextConfig", "Gemma4ForCausalLM", **GEMMA_4, num_kv_shared_layers=2, use_double_wide_mlp=True),
    "gemma4-experts": of(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        **GEMMA_4 | {"hidden_size_per_layer_input": 0},
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=5.0,
    ),
    "granite": of("GraniteConfig", "GraniteForCausalLM", **GRANITE),
    "command-r": of("CohereConfig", "CohereForCausalLM", logit_scale=0.3),
    "command-r-plus": of("CohereConfig", "CohereForCausalLM", logit_scale=0.3, use_qk_norm=True, num_hidden_layers=64),
    "cohere2": of("Cohere2Config", "Cohere2ForCausalLM", logit_scale=0.3, num_hidden_layers=5, sliding_window=16),
    "olmo": of("OlmoConfig", "OlmoForCausalLM", clip_qkv=0.5),
    "olmo2": of("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": of("Olmo3Config", "Olmo3ForCausalLM", **_WINDOWS, rope_parameters=_olmo3_rope(YARN)),
    "phi2": of("PhiConfig", "PhiForCausalLM"),
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
    "gpt2": _gpt2,
    "gptneox": of("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "gptneox-sequential": of("GPTNeoXConfig", "GPTNeoXForCausalLM", use_parallel_residual=False),
    "starcoder": of("GPTBigCodeConfig", "GPTBigCodeForCausalLM", n_inner=96),
    "starcoder-all-heads": of("GPTBigCodeConfig", "GPTBigCodeForCausalLM", n_inner=96, multi_query=False),
    "starcoder2": of("Starcoder2Config", "Starcoder2ForCausalLM"),
    "bloom": of("BloomConfig", "BloomForCausalLM"),
    "bloom-uneven": of("BloomConfig", "BloomForCausalLM", hidden_size=96, num_attention_heads=6),
    "falcon": of("FalconConfig", "FalconForCausalLM"),
    "falcon-groups": of("FalconConfig", "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2),
    "falcon-one-norm": of(
        "FalconConfig",
        "FalconForCausalLM",
        new_decoder_architecture=True,
        num_kv_heads=4,
        num_ln_in_parallel_attn=1,
        ffn_hidden_size=96,
    ),
    "mpt": of("MptConfig", "MptForCausalLM", num_attention_heads=6, hidden_size=96, attn_config={"clip_qkv": 0.5}),
    "stablelm": of("StableLmConfig", "StableLmForCausalLM", use_qkv_bias=True),
    "stablelm-parallel": of(
        "StableLmConfig",
        "StableLmForCausalLM",
        use_parallel_residual=True,
        qk_layernorm=True,
        partial_rotary_factor=0.5,
    ),
    "nemotron": of("NemotronConfig", "NemotronForCausalLM", attention_bias=True, mlp_bias=True),
    "chatglm": of("GlmConfig", "GlmForCausalLM", head_dim=16),
    "glm4": of("Glm4Config", "Glm4ForCausalLM", head_dim=32, tie_word_embeddings=True),
    "ernie4_5": of("Ernie4_5Config", "Ernie4_5ForCausalLM", head_dim=32),
    "exaone4": of(
        "Exaone4Config",
        "Exaone4ForCausalLM",
        sliding_window=None,
        layer_types=["full_attention"] * 2,
        rope_parameters=LLAMA3,
    ),
    "exaone4-windows": of(
        "Exaone4Config", "Exaone4ForCausalLM", num_hidden_layers=64, layer_types=_KINDS * 16, sliding_window=16
    ),
    "hunyuan-dense": of(
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        head_dim=32,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    ),
    "seed_oss": of("SeedOssConfig", "SeedOssForCausalLM", head_dim=32),
    "smollm3": of("SmolLM3Config", "SmolLM3ForCausalLM", num_hidden_layers=5, tie_word_embeddings=True),
    "arcee": of("ArceeConfig", "ArceeForCausalLM", head_dim=32, rope_parameters={**YARN, "mscale": 1.0}),
    "apertus": of("ApertusConfig", "ApertusForCausalLM", head_dim=32, rope_parameters=LLAMA3),
    "jais2": of("Jais2Config", "Jais2ForCausalLM", head_dim=32),
    "minicpm3": of("MiniCPM3Config", "MiniCPM3ForCausalLM", **_LATENT, hidden_size=_WIDE),
    "minicpm3-long": of(
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        **_LATENT,
        hidden_size=_WIDE,
        original_max_position_embeddings=16,
        rope_parameters=longrope(8, 16),
    ),
    "youtu": of("YoutuConfig", "YoutuForCausalLM", **_LATENT),
}
