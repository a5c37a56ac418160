"""Architectures of the text parts of models that take images, whose positions have several axes. Data, and light.

Sources: llama.cpp's ``conversion/qwenvl.py`` and ``src/models/qwen2vl.cpp``, ``qwen3vl.cpp``, ``qwen3vlmoe.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed
from slipway_gguf.architectures.entry import Architecture, Key, Numbers
from slipway_gguf.architectures.settings import EVERY_LAYER, EXPERTS, SILU, SILU_WITHOUT_BIAS, sections


def _deepstack(numbers: Numbers) -> int:
    """Return the number of layers that take features of an image, which llama.cpp's file of the image's part brings."""
    vision = numbers.config.get("vision_config")
    listed = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    return len(listed) if isinstance(listed, list) else 0


_QWEN_2_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_window_layers": 80,
}
_QWEN_3_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
}
_QWEN3_KEYS: Mapping[str, Key] = {"rope.dimension_sections": sections, "n_deepstack_layers": _deepstack}

VISION: tuple[Architecture, ...] = (
    *(
        Architecture(
            "qwen2vl",
            DecoderClass(class_name, _QWEN_2_DEFAULTS, windowed=Windowed.ASKED, local=Local.LAST),
            assumes=SILU,
            rope=("mrope", "yarn"),
            keys={"rope.dimension_sections": sections},
            wholes={class_name: ""},
        )
        for class_name in ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
    ),
    Architecture(
        "qwen3vl",
        DecoderClass("Qwen3VLForConditionalGeneration", {**_QWEN_3_DEFAULTS, "head_dim": 128}),
        assumes=SILU_WITHOUT_BIAS,
        rope=("mrope", "yarn"),
        keys=_QWEN3_KEYS,
        wholes={"Qwen3VLForConditionalGeneration": ""},
    ),
    Architecture(
        "qwen3vlmoe",
        DecoderClass(
            "Qwen3VLMoeForConditionalGeneration",
            {
                **_QWEN_3_DEFAULTS,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "tie_word_embeddings": True,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
            },
        ),
        assumes={**SILU_WITHOUT_BIAS, **EVERY_LAYER, "norm_topk_prob": (True,)},
        rope=("mrope", "yarn"),
        experts=EXPERTS,
        keys=_QWEN3_KEYS,
        wholes={"Qwen3VLMoeForConditionalGeneration": ""},
    ),
)
