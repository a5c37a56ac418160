"""Classes of mixtures of experts beside the families of Qwen, Mixtral, DeepSeek and GLM. Data, and light."""

from __future__ import annotations

from slipway.model.decoders.kinds import DecoderClass, Local, Windowed

MIXTURES = (
    DecoderClass(
        "Llama4ForCausalLM",
        {
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        by_layer=True,
    ),
    DecoderClass(
        "Dots1ForCausalLM",
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "moe_intermediate_size": 1408,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        windowed=Windowed.ALWAYS,
        local=Local.LAST,
    ),
    DecoderClass(
        "MiniMaxM2ForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rms_norm_eps": 1e-6,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "rope_theta": 5_000_000.0,
        },
        turned="rotary_dim",
    ),
    DecoderClass(
        "Ernie4_5_MoeForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "rope_theta": 500_000.0,
        },
    ),
    DecoderClass(
        "HunYuanMoEV1ForCausalLM",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
    ),
)
