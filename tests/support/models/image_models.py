"""Tiny models that take images, as llama.cpp can run them, and what transformers computes of the same pixels."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from support.models.current_kinds import make_kind
from support.models.current_recipes import EYE, IMAGE_TOKENS, QWEN_EYE, ROPE, SIZES, Recipe
from support.models.gguf_models import compute_like_llama, save_tokenizer

MEAN, DEVIATION = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
"""Colours of the processor; no class has these defaults."""
_BREAK = "[IMG_BREAK]"
_MARKS = (_BREAK, "\n\n", "<fake_token_around_image>", "<global-img>")
"""Tokens that llama.cpp puts beside images, and needs in the vocabulary."""
_IMAGE = 310
"""The token that stands for an image."""


@dataclass(frozen=True)
class ImageKind:
    """How a kind is made so that llama.cpp computes it, and how transformers is asked.

    Attributes:
        size: Height and width of an image that is not resized.
        ask: Returns transformers' arguments for an image beside the tokens.
        config: Settings of ``config.json`` to change, by part.
        recipe: How its base is made; None for that of the kind of this name.
        processor: Settings of its image processor; None for colours that no class has as defaults.
        limit: Largest difference of log probabilities.
    """

    size: tuple[int, int]
    ask: Callable[[Any, np.ndarray], dict[str, Any]]
    config: Sequence[tuple[str, dict[str, Any]]] = ()
    recipe: Recipe | None = None
    processor: dict[str, Any] | None = None
    limit: float = 2e-4


def _patches(model: Any, image: np.ndarray) -> dict[str, Any]:
    """Return the patches of an image as Qwen's processor orders them: two equal frames, squares of patches that are merged."""
    eye = model.config.vision_config
    size, merge, frames = eye.patch_size, eye.spatial_merge_size, eye.temporal_patch_size
    rows, columns = image.shape[0] // size, image.shape[1] // size
    values = np.stack([_normalized(image)] * frames)
    values = values.reshape(frames, 3, rows // merge, merge, size, columns // merge, merge, size)
    values = values.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
    return {"pixel_values": torch.from_numpy(values), "image_grid_thw": torch.tensor([[1, rows, columns]])}


def _plain(_: Any, image: np.ndarray) -> dict[str, Any]:
    return {"pixel_values": torch.from_numpy(_normalized(image))[None]}


def _twice(_: Any, image: np.ndarray) -> dict[str, Any]:
    """Return an image and the only part that it is cut into."""
    return {"pixel_values": torch.from_numpy(np.stack([_normalized(image)] * 2))[None]}


def _flat(model: Any, values: np.ndarray) -> np.ndarray:
    """Return an image as a row of values for each patch. (patches, height · width · colours)"""
    size = model.config.vision_config.patch_size
    rows, columns = values.shape[1] // size, values.shape[2] // size
    return values.reshape(3, rows, size, columns, size).transpose(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)


def _shaped(model: Any, image: np.ndarray) -> dict[str, Any]:
    size = model.config.vision_config.patch_size
    values = torch.from_numpy(_flat(model, _normalized(image)))
    shape = [image.shape[0] // size, image.shape[1] // size]
    return {
        "pixel_values": values,
        "spatial_shapes": torch.tensor([shape]),
        "pixel_attention_mask": torch.ones(values.shape[:2], dtype=torch.long),
    }


def _placed(model: Any, image: np.ndarray) -> dict[str, Any]:
    size = model.config.vision_config.patch_size
    rows, columns = image.shape[0] // size, image.shape[1] // size
    values = (image / 255).transpose(2, 0, 1).astype(np.float32)
    places = torch.tensor([[[column, row] for row in range(rows) for column in range(columns)]])
    return {"pixel_values": torch.from_numpy(_flat(model, values)), "image_position_ids": places}


def _sized(_: Any, image: np.ndarray) -> dict[str, Any]:
    return {**_plain(_, image), "image_sizes": torch.tensor([image.shape[:2]])}


def _normalized(image: np.ndarray) -> np.ndarray:
    values = (image / 255 - np.array(MEAN)) / np.array(DEVIATION)
    return values.transpose(2, 0, 1).astype(np.float32)


_QWEN2_EYE = {key: QWEN_EYE[key] for key in ("depth", "num_heads", "patch_size")} | {"embed_dim": 32, "mlp_ratio": 2}
KINDS: dict[str, ImageKind] = {
    # llama.cpp's shares of axes leave no frequency out.
    "qwen3-vl": ImageKind((32, 48), _patches, [("text_config.rope_parameters", {"mrope_section": [3, 3, 2]})]),
    "qwen3.5-vision": ImageKind((32, 48), _patches),
    "qwen3.5-moe-vision": ImageKind((32, 48), _patches),
    # More than one window of 112 pixels.
    "qwen2.5-vl": ImageKind((64, 160), _patches, [("vision_config", {"window_size": 112})]),
    "qwen2-vl": ImageKind(
        (32, 48),
        _patches,
        recipe=Recipe(
            "Qwen2VLConfig",
            "Qwen2VLForConditionalGeneration",
            {
                "text_config": {**SIZES, "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}},
                "vision_config": {**_QWEN2_EYE, "hidden_size": 64},
                **IMAGE_TOKENS,
            },
        ),
    ),
    "gemma3-vision": ImageKind((16, 16), _plain),
    "mistral3": ImageKind((32, 48), _sized),
    **{
        name.lower(): ImageKind(
            (16, 16),
            _twice,
            recipe=Recipe(
                f"{name}Config",
                f"{name}ForConditionalGeneration",
                {"text_config": {**SIZES, "model_type": "llama"}, "vision_config": EYE, "image_token_id": _IMAGE},
            ),
        )
        for name in ("SmolVLM", "Idefics3")
    },
    "internvl": ImageKind(
        (16, 16),
        _plain,
        recipe=Recipe(
            "InternVLConfig",
            "InternVLForConditionalGeneration",
            {
                "text_config": {**SIZES, "model_type": "qwen2"},
                "vision_config": {**EYE, "attention_bias": True},
                "image_token_id": _IMAGE,
            },
        ),
    ),
    "lfm2-vl": ImageKind(
        (64, 64),
        _shaped,
        recipe=Recipe(
            "Lfm2VlConfig",
            "Lfm2VlForConditionalGeneration",
            {
                "text_config": {
                    **SIZES,
                    "model_type": "lfm2",
                    "layer_types": ["conv", "full_attention", "conv"],
                    "num_hidden_layers": 3,
                    "block_multiple_of": 16,
                },
                "vision_config": {**EYE, "num_patches": 256},
                "projector_hidden_size": 48,
                "image_token_id": _IMAGE,
            },
        ),
    ),
    # In layers with full attention, llama.cpp lets an image's tokens see later ones, and transformers does not.
    "gemma4-vision": ImageKind(
        (120, 144),
        _placed,
        [("text_config", {"use_bidirectional_attention": "vision"})],
        processor={"do_normalize": False},
        limit=5e-3,
    ),
}


def make_image_kind(name: str, folder: Path) -> Path:
    """Save the base of a kind and return its folder: with settings of a processor, and without layers for further tokens."""
    base = _save(KINDS[name].recipe, folder / "base") if KINDS[name].recipe else make_kind(name, folder).base
    path = base / "config.json"
    config = json.loads(path.read_text())
    for place, settings in KINDS[name].config:
        part = config
        for key in place.split("."):
            part = part[key]
        part |= settings
    path.write_text(json.dumps(config))
    processor = KINDS[name].processor or {"image_mean": MEAN, "image_std": DEVIATION}
    (base / "preprocessor_config.json").write_text(json.dumps(processor))
    file = base / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("mtp.")}
    save_file(kept, file, metadata={"format": "pt"})
    tokenizer = tf.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(list(_MARKS), special_tokens=True)
    tokenizer.save_pretrained(base)
    return base


def _save(recipe: Recipe, base: Path) -> Path:
    """Save a model in which every weight matters, and its tokenizer."""
    torch.manual_seed(0)
    model = recipe.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
    model.save_pretrained(base)
    save_tokenizer(base)
    (base / "processor_config.json").write_text("{}")
    return base


def image_of(name: str, *, seed: int = 1) -> np.ndarray:
    """Return an image of a size that is not resized. (height, width, 3), bytes"""
    return np.random.default_rng(seed).integers(0, 256, (*KINDS[name].size, 3), dtype=np.uint8)


@dataclass(frozen=True)
class Reference:
    """What transformers computes: embeddings in the place of the image's tokens, and log probabilities of the next token."""

    embeddings: np.ndarray
    distribution: np.ndarray


def compute(name: str, base: Path, image: np.ndarray, pieces: Sequence[list[int] | np.ndarray]) -> Reference:
    """Compute a prompt with an image among its tokens by transformers, with llama.cpp's roundings."""
    config = json.loads((base / "config.json").read_text())
    model = getattr(tf, config["architectures"][0]).from_pretrained(base, dtype=torch.float32).eval()
    _compute_like_llama(model, name)
    asked = KINDS[name].ask(model, image)
    with torch.no_grad():
        features = model.model.get_image_features(**asked)
        parts = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
        embeddings = torch.cat([_joined(each) for each in parts], -1)
        tokens = [
            each if isinstance(each, list) else _image_tokens(model, name, image, len(each), base) for each in pieces
        ]
        inside = [
            token for each, own in zip(pieces, tokens, strict=True) if not isinstance(each, list) for token in own
        ]
        embeddings = _with_breaks(model, embeddings, inside)
        ids = [token for own in tokens for token in own]
        types = torch.tensor(
            [[int(not isinstance(each, list)) for each, own in zip(pieces, tokens, strict=True) for _ in own]]
        )
        if name.startswith("qwen"):
            asked["mm_token_type_ids"] = types
        if name == "gemma3-vision":
            asked["token_type_ids"] = types
        if name == "gemma4-vision":
            asked["mm_token_type_ids"] = types
        logits = model(input_ids=torch.tensor([ids]), **asked).logits[0, -1]
    return Reference(embeddings.numpy(), torch.log_softmax(logits.double(), -1).numpy())


def _joined(part: Any) -> torch.Tensor:
    """Return features as one tensor; some classes return one for each image."""
    whole = part if isinstance(part, torch.Tensor) else torch.cat(list(part))
    return whole.reshape(-1, whole.shape[-1])


def _image_tokens(model: Any, name: str, image: np.ndarray, count: int, base: Path) -> list[int]:
    """Return the tokens that stand for an image: with Mistral, each row but the last ends with one of its own."""
    own = model.config.image_token_id
    if name != "mistral3":
        return [own] * count
    columns = image.shape[1] // model.config.vision_config.patch_size // model.config.spatial_merge_size
    count -= count // (columns + 1)  # breaks
    between = tf.AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(_BREAK)
    return ([*[own] * columns, between] * (count // columns))[:-1]


def _with_breaks(model: Any, embeddings: torch.Tensor, inside: list[int]) -> torch.Tensor:
    ids = torch.tensor(inside)
    if len(ids) == len(embeddings):
        return embeddings
    whole = model.get_input_embeddings()(ids)
    whole[ids == model.config.image_token_id] = embeddings
    return whole


def _quick_gelu(_: Any, inputs: tuple[torch.Tensor, ...], _result: torch.Tensor) -> torch.Tensor:
    values = inputs[0].half().float()
    return (values * torch.sigmoid(1.702 * values)).half().float()


def _compute_like_llama(model: Any, name: str) -> None:
    """Round as llama.cpp does: pixels and weights of convolutions to float16, GELU as in a table; no epsilon in Qwen2's text."""
    compute_like_llama(model)
    for module in model.modules():
        if type(module).__name__ == "QuickGELUActivation":
            module.register_forward_hook(_quick_gelu)
    for path, module in model.named_modules():
        is_patches = path.endswith(
            ("patch_embedding", "patch_embedder.input_proj")
        )  # a matrix for what is a convolution
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d) or is_patches:
            module.weight.data = module.weight.data.half().float()
            module.register_forward_pre_hook(lambda _, inputs: tuple(each.half().float() for each in inputs))
    if name.startswith("qwen2"):
        for module in model.model.language_model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 0.0
