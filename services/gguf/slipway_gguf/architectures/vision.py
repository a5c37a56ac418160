"""Architectures of the text parts of models that take images, whose positions have several axes. Data, and light.

Sources: llama.cpp's ``conversion/qwenvl.py`` and ``src/models/qwen2vl.cpp``, ``qwen3vl.cpp``, ``qwen3vlmoe.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipway_gguf.architectures.entry import Architecture, Key, Numbers
from slipway_gguf.architectures.settings import EVERY_LAYER, EXPERTS, SILU, SILU_WITHOUT_BIAS, sections


def _deepstack(numbers: Numbers) -> int:
    """Return the number of layers that take features of an image, which llama.cpp's file of the image's part brings."""
    vision = numbers.config.get("vision_config")
    listed = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    return len(listed) if isinstance(listed, list) else 0


_QWEN3_KEYS: Mapping[str, Key] = {"rope.dimension_sections": sections, "n_deepstack_layers": _deepstack}

VISION: tuple[Architecture, ...] = (
    *(
        Architecture(
            "qwen2vl",
            class_name,
            assumes=SILU,
            rope=("mrope", "yarn"),
            keys={"rope.dimension_sections": sections},
        )
        for class_name in ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
    ),
    Architecture(
        "qwen3vl",
        "Qwen3VLForConditionalGeneration",
        assumes=SILU_WITHOUT_BIAS,
        rope=("mrope", "yarn"),
        keys=_QWEN3_KEYS,
    ),
    Architecture(
        "qwen3vlmoe",
        "Qwen3VLMoeForConditionalGeneration",
        assumes={**SILU_WITHOUT_BIAS, **EVERY_LAYER, "norm_topk_prob": (True,)},
        rope=("mrope", "yarn"),
        experts=EXPERTS,
        keys=_QWEN3_KEYS,
    ),
)
