"""Recipes of tiny models of the architectures of this year: classes, settings, and what a checkpoint holds beside what is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers as tf

from slipway.machine.absent_parts import leave_out_absent_parts

VOCABULARY = 320
"""More rows than the tokenizer has tokens, as in many models."""
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_PLAIN: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, **_TOKENS}
SIZES: dict[str, Any] = {
    **_PLAIN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_PARTIAL = {**ROPE, "partial_rotary_factor": 0.25}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
_GEMMA: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "pad_token_id": 0,
}
IMAGE_TOKENS = {"image_token_id": 310, "video_token_id": 311, "vision_start_token_id": 312, "vision_end_token_id": 313}
QWEN_EYE: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
EYE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_GEMMA4_EYE: dict[str, Any] = {
    **{name: value for name, value in EYE.items() if name != "image_size"},
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 64,
}
_GEMMA4_EAR: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": (16, 8),
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "output_proj_dims": 48,
}
_GEMMA4_MARKS = {
    "image_token_id": 310,
    "video_token_id": 311,
    "audio_token_id": 312,
    "boi_token_id": 313,
    "eoi_token_id": 314,
}
EAR: dict[str, Any] = {
    "model_type": "qwen3_asr_encoder",
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}


@dataclass(frozen=True)
class Recipe:
    """How a kind is made.

    Attributes:
        config: Its class of configuration.
        model: Its class.
        settings: Settings of the configuration.
        beside: Tensors in the checkpoint that transformers does not load, by name, with their shapes.
        head_layer: The layer whose tensors a multi-token head has too, by a part of their names, and the beginning of their names in the head.
        task: The task of its adapter.
        packed: Whether the experts are stored as MXFP4.
    """

    config: str
    model: str
    settings: Mapping[str, Any]
    beside: Mapping[str, tuple[int, ...]] | None = None
    head_layer: tuple[str, str] | None = None
    task: str = "CAUSAL_LM"
    packed: bool = False

    def build(self) -> Any:
        leave_out_absent_parts()
        return getattr(tf, self.model)(getattr(tf, self.config)(**self.settings))


_MTP = {
    "mtp.fc.weight": (64, 128),
    "mtp.norm.weight": (64,),
    "mtp.pre_fc_norm_embedding.weight": (64,),
    "mtp.pre_fc_norm_hidden.weight": (64,),
}
_MTP_LAYER = ("layers.3.", "mtp.layers.0.")
_NEXT_LAYER = {
    "model.layers.3.eh_proj.weight": (64, 128),
    "model.layers.3.enorm.weight": (64,),
    "model.layers.3.hnorm.weight": (64,),
    "model.layers.3.embed_tokens.weight": (VOCABULARY, 64),
    "model.layers.3.shared_head.norm.weight": (64,),
    "model.layers.3.shared_head.head.weight": (VOCABULARY, 64),
}
_NEXT = ("layers.2.", "model.layers.3.")


_QWEN35 = {**SIZES, **_DELTA, "rope_parameters": {**_PARTIAL, **_SECTIONS}}
_QWEN_NEXT = {**SIZES, **_DELTA, **_EXPERTS, "rope_parameters": _PARTIAL, "norm_topk_prob": True}
_OSS = {
    **SIZES,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                        "original_max_position_embeddings": 64},
}  # fmt: skip
_GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 3.0}
_GRANITE_HYBRID = {
    **SIZES,
    **_MAMBA,
    **_GRANITE,
    "shared_intermediate_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
}
_MISTRAL = {**SIZES, "head_dim": 16, "rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1}}  # fmt: skip
_GEMMA4 = {
    **_GEMMA,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "final_logit_softcapping": 30.0,
}
_GEMMA3N = {
    **{name: value for name, value in _GEMMA.items() if name != "layer_types"},
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": VOCABULARY - 20,
    "num_hidden_layers": 25,
    "num_kv_shared_layers": 5,
    "intermediate_size": 384,
}
"""llama.cpp has these widths, the rank of LAuReL and the layers that are sparse as constants."""
_GEMMA3N_EAR: dict[str, Any] = {
    "input_feat_size": 16,
    "conf_attention_chunk_size": 4,
    "conf_attention_context_left": 5,
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 2,
    "sscp_conv_channel_size": (16, 8),
}


def _offset(first: int) -> dict[str, Any]:
    """Return settings of a part whose own tokens begin at one of the vocabulary."""
    return {"hidden_size": 32, "vocab_size": 10, "vocab_offset": first}


_NEMOTRON = {
    **{name: value for name, value in SIZES.items() if name != "num_hidden_layers"},
    "head_dim": 16,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
}

_PAIRLESS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}

KINDS: dict[str, Recipe] = {
    "qwen3.5": Recipe("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _QWEN35, _MTP, _MTP_LAYER),
    "qwen3.5-vision": Recipe(
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        {"text_config": _QWEN35, "vision_config": QWEN_EYE, **IMAGE_TOKENS},
        _MTP,
        _MTP_LAYER,
    ),
    "qwen3.5-moe": Recipe("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_QWEN35, **_EXPERTS}, _MTP, _MTP_LAYER),
    "qwen3.5-moe-vision": Recipe(
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": {**_QWEN35, **_EXPERTS}, "vision_config": QWEN_EYE, **IMAGE_TOKENS},
        _MTP,
        _MTP_LAYER,
    ),
    "qwen3-next": Recipe("Qwen3NextConfig", "Qwen3NextForCausalLM", _QWEN_NEXT, _MTP, _MTP_LAYER),
    "qwen3-vl": Recipe(
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**SIZES, "head_dim": 16, "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}},
            "vision_config": {**QWEN_EYE, "deepstack_visual_indexes": [0]},
            **IMAGE_TOKENS,
        },
    ),
    "qwen2.5-vl": Recipe(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**SIZES, "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}},
            "vision_config": {**QWEN_EYE, "window_size": 16, "fullatt_block_indexes": [1]},
            **IMAGE_TOKENS,
        },
    ),
    "gemma3-vision": Recipe(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                **_GEMMA,
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
                "query_pre_attn_scalar": 32,
            },
            "vision_config": EYE,
            "mm_tokens_per_image": 4,
            "image_token_index": 310,
            "boi_token_index": 311,
            "eoi_token_index": 312,
        },
    ),
    "gemma3n": Recipe("Gemma3nTextConfig", "Gemma3nForCausalLM", _GEMMA3N),
    "gemma3n-senses": Recipe(
        "Gemma3nConfig",
        "Gemma3nForConditionalGeneration",
        {
            "text_config": {**_GEMMA3N, "max_position_embeddings": 1024},
            "vision_config": {
                "architecture": "test_resnet",
                **_offset(300),
                "hidden_size": 96,
                "label_names": ["LABEL_0", "LABEL_1"],
            },
            "vision_soft_tokens_per_image": 576,
            "audio_config": {**_GEMMA3N_EAR, **_offset(310)},
            "image_token_id": 301,
            "audio_token_id": 311,
            "audio_soft_tokens_per_image": 6,
        },
        {"model.vision_tower.timm_model.conv1.0.weight": (16, 3, 3, 3)},  # where timm computes it, one of many
    ),
    "gemma4": Recipe("Gemma4TextConfig", "Gemma4ForCausalLM", _GEMMA4),
    "gemma4-moe": Recipe(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gemma4-vision": Recipe(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": _GEMMA4,
            "vision_config": _GEMMA4_EYE,
            "audio_config": None,
            **_GEMMA4_MARKS,
        },
    ),
    "gemma4-audio": Recipe(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {"text_config": _GEMMA4, "vision_config": None, "audio_config": _GEMMA4_EAR, **_GEMMA4_MARKS},
    ),
    "gemma4-senses": Recipe(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {"text_config": _GEMMA4, "vision_config": _GEMMA4_EYE, "audio_config": _GEMMA4_EAR, **_GEMMA4_MARKS},
    ),
    "qwen3-asr": Recipe(
        "Qwen3ASRConfig",
        "Qwen3ASRForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen3", **SIZES, "head_dim": 32, "tie_word_embeddings": True},
            "audio_config": EAR,
            "audio_token_id": 310,
            "pad_token_id": 2,
            "eos_token_id": 2,
        },
    ),
    "voxtral": Recipe(
        "VoxtralConfig",
        "VoxtralForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **SIZES, "head_dim": 16},
            "audio_config": {
                "model_type": "voxtral_encoder",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 40,
            },
            "audio_token_id": 310,
        },
    ),
    "gpt-oss": Recipe("GptOssConfig", "GptOssForCausalLM", _OSS),
    "gpt-oss-mxfp4": Recipe("GptOssConfig", "GptOssForCausalLM", _OSS, packed=True),
    "granite4": Recipe(
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {**_GRANITE_HYBRID, "num_local_experts": 0}
    ),
    "granite4-moe": Recipe(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "lfm2": Recipe(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**SIZES, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_multiple_of": 16},
    ),
    "lfm2-moe": Recipe(
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {
            **SIZES,
            **{name: value for name, value in _EXPERTS.items() if not name.startswith("shared")},
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
        },
    ),
    "falcon-h1": Recipe(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        # As the released models with norms have it: behind the gate.
        {**SIZES, **_MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "mistral3": Recipe(
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**_MISTRAL, "model_type": "ministral3"},
            "vision_config": {**EYE, "model_type": "pixtral", "head_dim": 16},
            "image_token_index": 310,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": Recipe("Ministral3Config", "Ministral3ForCausalLM", _MISTRAL),
    "deepseek-v3": Recipe(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**SIZES, **_GROUPED, **_LATENT},
        _NEXT_LAYER,
        _NEXT,
    ),
    "glm4-moe": Recipe(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        # One group of experts, as the released models have.
        {**SIZES, **_GROUPED, "n_group": 1, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
        _NEXT_LAYER,
        _NEXT,
    ),
    "nemotron-h": Recipe(
        "NemotronHConfig", "NemotronHForCausalLM", {**_NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp"]}
    ),
    "nemotron-h-moe": Recipe(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_NEMOTRON,
            "layers_block_type": ["mamba", "attention", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "bamba": Recipe("BambaConfig", "BambaForCausalLM", {**SIZES, **_MAMBA, "attn_layer_indices": [1]}),
    "mamba2": Recipe(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**_PLAIN, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16, "expand": 2},
    ),
    "qwen3-embedding": Recipe("Qwen3Config", "Qwen3Model", {**SIZES, "head_dim": 32}, task="FEATURE_EXTRACTION"),
    "qwen3-reranker": Recipe(
        "Qwen3Config",
        "Qwen3ForSequenceClassification",
        {**SIZES, "head_dim": 32, "num_labels": 1, "pad_token_id": 0},
        task="SEQ_CLS",
    ),
    "reward": Recipe(
        "LlamaConfig", "LlamaForSequenceClassification", {**SIZES, "num_labels": 1, "pad_token_id": 0}, task="SEQ_CLS"
    ),
    "bge-m3": Recipe(
        "XLMRobertaConfig", "XLMRobertaModel", {**_PAIRLESS, "pad_token_id": 1}, task="FEATURE_EXTRACTION"
    ),
    "bge-reranker": Recipe(
        "XLMRobertaConfig",
        "XLMRobertaForSequenceClassification",
        {**_PAIRLESS, "num_labels": 1, "pad_token_id": 1},
        task="SEQ_CLS",
    ),
    "modernbert": Recipe("ModernBertConfig", "ModernBertModel", _PAIRLESS, task="FEATURE_EXTRACTION"),
    "llama4": Recipe(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **SIZES,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 16,
        },
    ),
    "mixtral": Recipe("MixtralConfig", "MixtralForCausalLM", {**SIZES, "num_local_experts": 4}),
    "granite-moe": Recipe(
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {**SIZES, **_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
"""Recipes by the names of their kinds."""
