"""Tiny models that take images, each with a LoRA on every layer that trainers reach, also in the part for images."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers as tf

from support.models.current_kinds import Kind, save_adapter
from support.models.current_recipes import EYE, SIZES, Recipe
from support.models.gguf_models import save_tokenizer
from support.models.image_models import KINDS, make_image_kind

LLAVA = Recipe(
    "LlavaConfig",
    "LlavaForConditionalGeneration",
    {
        "text_config": {**SIZES, "model_type": "llama"},
        "vision_config": {**EYE, "model_type": "clip_vision_model"},
        "image_token_id": 310,
        "vision_feature_layer": -2,
    },
)
NAMES = (*KINDS, "llava")


def make_pictured_kind(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Kind:
    """Save base and adapter of a kind, whose files say how pixels become numbers."""
    base = _save_llava(folder / "base") if name == "llava" else make_image_kind(name, folder)
    kind = Kind(name, base, folder / "picture_adapter")
    architecture = json.loads((base / "config.json").read_text())["architectures"][0]
    model = getattr(tf, architecture).from_pretrained(base, dtype=torch.float32).eval()
    if dtype is not torch.float32:
        companions = {each.name: each.read_bytes() for each in base.iterdir() if each.suffix == ".json"}
        model.to(dtype).save_pretrained(base)
        for each in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"):
            if each in companions:
                (base / each).write_bytes(companions[each])
        model = model.float()
    save_adapter(model, kind, "CAUSAL_LM")
    return kind


def _save_llava(base: Path) -> Path:
    torch.manual_seed(0)
    model = LLAVA.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
    model.save_pretrained(base)
    save_tokenizer(base)
    (base / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]})
    )
    return base
