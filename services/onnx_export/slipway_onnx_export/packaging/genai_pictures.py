"""The parts of ``genai_config.json`` about pictures, for the models whose graphs onnxruntime-genai takes as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipway.model.graphs.pictures import EMBEDDING, VISION_ENCODER
from slipway.model.model_files import processor_settings
from slipway_onnx_export.names import EMBEDS
from slipway_onnx_export.packaging.graphs import Interface, read_interface
from slipway_onnx_export.packaging.kinds import NotPackagedError, Packaged

_TYPES: Mapping[str, str] = {
    "mistral3": "mistral3",
    "qwen2_vl": "qwen2_5_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
}
"""The runtime's type by that of the model. It knows others, and gives their decoders other inputs than Slipway's have."""
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id")

PICTURE_FILE = "vision_processor.json"
_QWEN2 = ("qwen2_vl", "qwen2_5_vl")
"""Types whose pictures the runtime prepares as transformers does."""
_USUAL: Mapping[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "rescale_factor": 1 / 255,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 1280,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
"""What Qwen2-VL's processor takes for settings that its file leaves out."""
_LARGEST_PATCH = 1024
"""Pixels of a patch in one direction, and patches that become a token."""
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


def add_pictures(model: Packaged, config: dict[str, Any], session: Mapping[str, Any]) -> None:
    """Add encoder and embedding to the configuration of a decoder, in place; write how pictures are prepared, where the runtime can.

    Args:
        model: The folder.
        config: The part ``model`` of the configuration.
        session: Options of a session.

    Raises:
        NotPackagedError: The runtime does not run pictures of this type of model with such graphs.
    """
    named = str(model.config.get("model_type"))
    if named not in _TYPES:
        known = ", ".join(sorted(_TYPES))
        raise NotPackagedError(f"onnxruntime-genai takes such graphs of {known}, and the model is of type {named}")
    encoder, embedding = (read_interface(model.folder, name) for name in (VISION_ENCODER, EMBEDDING))
    token = model.config.get("image_token_id", model.config.get("image_token_index"))
    if not isinstance(token, int):
        raise NotPackagedError("its config.json states no token of an image (image_token_id)")
    config["type"] = _TYPES[named]
    config["decoder"]["inputs"] = {EMBEDS: EMBEDS, **config["decoder"]["inputs"]}
    config |= {name: number for name in _TOKENS if isinstance(number := model.config.get(name), int)}
    config["image_token_id"] = token
    config["vision"] = {
        "session_options": session,
        "filename": VISION_ENCODER,
        "spatial_merge_size": _merged(model),
        **_ports(encoder),
    }
    if named in _QWEN2 and (steps := _preparation(model)):
        (model.folder / PICTURE_FILE).write_text(json.dumps(steps, indent=2) + "\n", encoding="utf-8")
        config["vision"]["config_filename"] = PICTURE_FILE
    config["embedding"] = {"session_options": session, "filename": EMBEDDING, **_ports(embedding)}


def _merged(model: Packaged) -> int:
    """Return how many patches become one token in either direction; 2 is the default of all these classes."""
    eye = model.config.get("vision_config")
    own = eye.get("spatial_merge_size") if isinstance(eye, Mapping) else None
    merged = own if own is not None else model.config.get("spatial_merge_size", 2)
    if not isinstance(merged, int):
        raise NotPackagedError(f"its config.json has the spatial_merge_size {merged!r}")
    return merged


def _preparation(model: Packaged) -> dict[str, Any]:
    """Return the operations that make patches of an image file; empty if the model's own files prepare pictures otherwise."""
    own = next(iter(processor_settings(model.folder, "image_processor")), {})
    if not own or not all(own.get(step, True) is True for step in _STEPS):
        return {}
    size = own.get("size")
    edges = size if isinstance(size, Mapping) else {}
    given = {**_USUAL, "min_pixels": edges.get("shortest_edge"), "max_pixels": edges.get("longest_edge")}
    given |= {name: own[name] for name in _USUAL if own.get(name) is not None}
    given |= {name: _USUAL[name] for name, value in given.items() if value is None}
    if not _is_usual(given):
        return {}
    squares = {"patch_size": given["patch_size"], "merge_size": given["merge_size"]}
    pixels = {"min_pixels": given["min_pixels"], "max_pixels": given["max_pixels"]}
    side = given["patch_size"] * given["merge_size"]  # the size that a smart resize does not use
    operations: list[dict[str, Any]] = [
        {"name": "decode_image", "type": "DecodeImage", "attrs": {"color_space": "RGB"}},
        {"name": "convert_to_rgb", "type": "ConvertRGB"},
        {
            "name": "resize",
            "type": "Resize",
            "attrs": {"height": side, "width": side, "smart_resize": 1, **pixels, **squares},
        },
        {"name": "rescale", "type": "Rescale", "attrs": {"rescale_factor": given["rescale_factor"]}},
        {
            "name": "normalize",
            "type": "Normalize",
            "attrs": {"mean": given["image_mean"], "std": given["image_std"], "qwen2_5_vl": 1},
        },
        {
            "name": "patch_image",
            "type": "PatchImage",
            "attrs": {**squares, "temporal_patch_size": given["temporal_patch_size"]},
        },
    ]
    return {
        "processor": {"name": "qwen2_5_image_processor", "transforms": [{"operation": each} for each in operations]}
    }


def _is_usual(given: Mapping[str, Any]) -> bool:
    """Return whether sizes are small numbers, and colours three: a folder's file may hold anything."""
    sizes = (given["patch_size"], given["merge_size"], given["temporal_patch_size"])
    colours = (given["image_mean"], given["image_std"])
    return all(type(each) is int and 0 < each <= _LARGEST_PATCH for each in sizes) and all(
        isinstance(each, list) and len(each) == 3 and all(isinstance(value, int | float) for value in each)
        for each in colours
    )


def _ports(graph: Interface) -> dict[str, dict[str, str]]:
    return {"inputs": {name: name for name in graph.inputs}, "outputs": {name: name for name in graph.outputs}}
