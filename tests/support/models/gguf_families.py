"""Makers of a tiny model for each architecture that is written as GGUF: those of the tables, and models with more parts than text. Data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import transformers as tf

from support.models.gguf_dense import DENSE, GEMMA_4, MINISTRAL_ROPE, gemma
from support.models.gguf_mixtures import LLAMA_4, MIXTURES
from support.models.gguf_recurrent import DELTA_NET, RECURRENT
from support.models.gguf_sizes import EXPERTS, SIZES

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


FAMILIES: dict[str, Callable[[], Any]] = {
    **DENSE,
    **MIXTURES,
    **RECURRENT,
    "gemma3-text-part": _parts("Gemma3", gemma(7, 6), _SIGLIP),
    "gemma4-text-part": _parts("Gemma4", {**GEMMA_4, "num_kv_shared_layers": 2, "pad_token_id": 0}, None),
    "llama4-text-part": _parts("Llama4", LLAMA_4, _LLAMA_4_VISION),
    "mistral3-text-part": _parts(
        "Mistral3", {"model_type": "ministral3", "head_dim": 32, "rope_parameters": MINISTRAL_ROPE}, _PIXTRAL
    ),
    "qwen2vl": _parts(
        "Qwen2_5_VL", {"rms_norm_eps": 1e-12, "rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}}, _QWEN_VISION
    ),
    "qwen3vl": _parts(
        "Qwen3VL",
        {"head_dim": 32, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5]}},
        {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3vlmoe": _parts(
        "Qwen3VLMoe",
        {**EXPERTS, "head_dim": 32, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5]}},
        {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen35-text-part": _parts(
        "Qwen3_5",
        {**DELTA_NET, "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}},
        _QWEN_VISION,
    ),
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
