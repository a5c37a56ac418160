"""Makers of a tiny model for dense decoders beside the families of Llama, Qwen and Gemma. Data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.models.gguf_sizes import LLAMA3, YARN, longrope, of

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

DENSE: dict[str, Callable[[], Any]] = {
    "gemma": of("GemmaConfig", "GemmaForCausalLM", head_dim=32),
    "command-r": of("CohereConfig", "CohereForCausalLM", logit_scale=0.3),
    "command-r-plus": of("CohereConfig", "CohereForCausalLM", logit_scale=0.3, use_qk_norm=True, num_hidden_layers=64),
    "cohere2": of("Cohere2Config", "Cohere2ForCausalLM", logit_scale=0.3, num_hidden_layers=5, sliding_window=16),
    "olmo": of("OlmoConfig", "OlmoForCausalLM", clip_qkv=0.5),
    "olmo2": of("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": of("Olmo3Config", "Olmo3ForCausalLM", **_WINDOWS, rope_parameters=_olmo3_rope(YARN)),
    "phi2": of("PhiConfig", "PhiForCausalLM"),
    "starcoder2": of("Starcoder2Config", "Starcoder2ForCausalLM"),
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
    "arcee": of("ArceeConfig", "ArceeForCausalLM", head_dim=32, rope_parameters={**YARN, "mscale": 1.0}),
    "apertus": of("ApertusConfig", "ApertusForCausalLM", head_dim=32, rope_parameters=LLAMA3),
    "gptneox": of("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "gptneox-sequential": of("GPTNeoXConfig", "GPTNeoXForCausalLM", use_parallel_residual=False),
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
    "starcoder": of("GPTBigCodeConfig", "GPTBigCodeForCausalLM", n_inner=96),
    "starcoder-all-heads": of("GPTBigCodeConfig", "GPTBigCodeForCausalLM", n_inner=96, multi_query=False),
    "mpt": of("MptConfig", "MptForCausalLM", num_attention_heads=6, hidden_size=96, attn_config={"clip_qkv": 0.5}),
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
