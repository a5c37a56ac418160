"""Settings of tiny models that take images too, one for each type whose text part is compared alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

from support.models.current_recipes import EYE, IMAGE_TOKENS, KINDS, QWEN_EYE, ROPE, SIZES

_SECTIONS = {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
_HALF = {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
_IMAGE = {"image_token_index": 310}
_GRID = {**_IMAGE, "image_grid_pinpoints": [[16, 16]]}
_SCOUT = {
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "moe_layers": [1],
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 16,
}
_SCOUT_EYE = {
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "pixel_shuffle_ratio": 0.5,
}
_QWEN2_EYE = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
_MIXTURE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLLAMA_EYE = {
    **{name: value for name, value in EYE.items() if name != "num_attention_heads"},
    "attention_heads": 2,
    "num_global_layers": 1,
    "vision_output_dim": 64,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]],
}


def _text(kind: str, **more: Any) -> dict[str, Any]:
    return {**SIZES, "model_type": kind, **more}


def _eye(kind: str, **more: Any) -> dict[str, Any]:
    return {**EYE, "model_type": kind, **more}


_OWN = {
    "aya_vision": ("AyaVision", _text("cohere2", head_dim=16, sliding_window=16), _eye("siglip_vision_model"), _IMAGE),
    "glm4v": ("Glm4v", {**SIZES, **_HALF}, {**QWEN_EYE, "image_size": 16}, IMAGE_TOKENS),
    "idefics3": ("Idefics3", _text("llama"), EYE, {"image_token_id": 310, "pad_token_id": 0}),
    "internvl": (
        "InternVL",
        _text("qwen2"),
        {**EYE, "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_token_id": 310},
    ),
    "lfm2_vl": (
        "Lfm2Vl",
        _text("lfm2", layer_types=["conv", "full_attention"], block_multiple_of=16),
        {
            **{name: value for name, value in _eye("siglip2_vision_model").items() if name != "image_size"},
            "num_patches": 16,
        },
        {"image_token_id": 310},
    ),
    "llama4": ("Llama4", {**SIZES, "head_dim": 16, **_SCOUT}, {**EYE, **_SCOUT_EYE}, _IMAGE),
    "llava": ("Llava", _text("llama"), _eye("clip_vision_model"), _IMAGE),
    "llava_next": ("LlavaNext", _text("mistral"), _eye("clip_vision_model"), _GRID),
    "llava_onevision": (
        "LlavaOnevision",
        _text("qwen2"),
        _eye("siglip_vision_model"),
        {**_GRID, "video_token_index": 311},
    ),
    "mllama": (
        "Mllama",
        {**SIZES, "pad_token_id": 0, "cross_attention_layers": [1], "num_hidden_layers": 3},
        _MLLAMA_EYE,
        _IMAGE,
    ),
    "qwen2_vl": ("Qwen2VL", {**SIZES, **_SECTIONS}, _QWEN2_EYE, IMAGE_TOKENS),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {**SIZES, **_SECTIONS, **_MIXTURE},
        {**QWEN_EYE, "deepstack_visual_indexes": [0]},
        IMAGE_TOKENS,
    ),
    "smolvlm": ("SmolVLM", _text("llama"), EYE, {"image_token_id": 310, "pad_token_id": 0}),
}
"""By type: the beginning of its classes' names, settings of text, of images, and of both."""
_OF_KINDS = {
    "gemma3": "gemma3-vision",
    "gemma3n": "gemma3n-senses",
    "gemma4": "gemma4-vision",
    "mistral3": "mistral3",
    "qwen2_5_vl": "qwen2.5-vl",
    "qwen3_5": "qwen3.5-vision",
    "qwen3_asr": "qwen3-asr",
    "qwen3_5_moe": "qwen3.5-moe-vision",
    "qwen3_vl": "qwen3-vl",
    "voxtral": "voxtral",
}
TYPES = sorted((*_OWN, *_OF_KINDS))
"""Every type that can be built here."""


def make_model(model_type: str) -> Any:
    """Make a model of a type, in which every weight matters."""
    torch.manual_seed(0)
    if model_type in _OF_KINDS:
        model = KINDS[_OF_KINDS[model_type]].build()
    else:
        name, text, image, both = _OWN[model_type]
        config = getattr(tf, f"{name}Config")(text_config=text, vision_config=image, **both)
        model = getattr(tf, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
    return model.eval()
