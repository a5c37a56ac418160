"""List the image encoders whose ``mmproj`` file can be written, as llama.cpp's ``mtmd`` computes them. Light."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.model.configuration import ModelConfig
from slipway.model.model_files import processor_settings
from slipway.texts import quoted
from slipway_gguf.vision.entry import Encoder, Seen, describe_other
from slipway_gguf.vision.gemma import GEMMA_4
from slipway_gguf.vision.intern import INTERN
from slipway_gguf.vision.pixtral import PIXTRAL
from slipway_gguf.vision.processor import added_tokens, colours, other_scale
from slipway_gguf.vision.qwen import QWEN
from slipway_gguf.vision.siglip import SIGLIP

ENCODERS: tuple[Encoder, ...] = (*QWEN, *SIGLIP, *PIXTRAL, *INTERN, *GEMMA_4)
"""In the order in which they are named to users."""


def encoder_of(config: ModelConfig) -> Encoder | None:
    """Return the image encoder of a model by its ``config.json``; None if no file is written for it."""
    kind = str(_vision(config).get("model_type"))
    return next((each for each in ENCODERS if config.class_name in each.classes and kind in each.kind), None)


def seen_by(encoder: Encoder, config: ModelConfig, folder: Path) -> Seen:
    """Return a model's settings for images."""
    own = {key: value for key, value in _vision(config).items() if value is not None}
    processor = next(iter(processor_settings(folder, "image_processor")), {})
    return Seen(config, {**encoder.defaults, **own}, processor, added_tokens(folder))


def why_no_projector(encoder: Encoder, seen: Seen) -> str:
    """Return why llama.cpp would compute this model's images wrong, or not at all; an empty text if it does not."""
    if not seen.processor:
        return "the model's folder has no preprocessor_config.json, which says how pixels become numbers"
    for key, values in encoder.assumes.items():
        value = seen.vision.get(key)
        if value is not None and value not in values:
            return describe_other(key, value, " or ".join(map(quoted, values)))
    for key in ("image_mean", "image_std"):
        if colours(seen.processor, key, encoder.mean) is None:
            return describe_other(key, seen.processor.get(key), "a number for each of three colours")
    return other_scale(seen.processor) or (encoder.refuses(seen) if encoder.refuses else "")


def _vision(config: ModelConfig) -> Mapping[str, Any]:
    vision = config.get("vision_config")
    return vision if isinstance(vision, Mapping) else {}
