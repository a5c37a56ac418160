"""The parts of ``genai_config.json`` about pictures, for the models whose graphs onnxruntime-genai takes as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.graphs.pictures import EMBEDDING, VISION_ENCODER
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


def add_pictures(model: Packaged, config: dict[str, Any], session: Mapping[str, Any]) -> None:
    """Add encoder and embedding to the configuration of a decoder, in place.

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
    config["embedding"] = {"session_options": session, "filename": EMBEDDING, **_ports(embedding)}


def _merged(model: Packaged) -> int:
    """Return how many patches become one token in either direction; 2 is the default of all these classes."""
    eye = model.config.get("vision_config")
    own = eye.get("spatial_merge_size") if isinstance(eye, Mapping) else None
    merged = own if own is not None else model.config.get("spatial_merge_size", 2)
    if not isinstance(merged, int):
        raise NotPackagedError(f"its config.json has the spatial_merge_size {merged!r}")
    return merged


def _ports(graph: Interface) -> dict[str, dict[str, str]]:
    return {"inputs": {name: name for name in graph.inputs}, "outputs": {name: name for name in graph.outputs}}
