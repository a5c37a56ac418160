"""Write the files beside the model in the output folder, so that it can be used on its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from slipway.distribution import installed_version, own_version
from slipway.model.families import DECODER, ENCODER_DECODER, RAW_SPEECH, SPEECH
from slipway.model.model_files import copy_companions
from slipway_onnx_export.params import LIBRARIES, OnnxExportParams
from slipway_onnx_export.source import ModelSource

LAYERED = "onnx-layered"

_EXAMPLES = {
    DECODER: "decoder.py",
    ENCODER_DECODER: "encoder_decoder.py",
    SPEECH: "speech.py",
    RAW_SPEECH: "speech.py",
}
"""Example of a family; the others read a text in one call."""


def folder_of_graphs(folder: Path, params: OnnxExportParams) -> Path:
    """Return where the graphs lie: in the output's folder, or below it if there is one for each layer, which no runtime knows."""
    return folder / LAYERED if params.layered else folder


def complete_folder(folder: Path, *, source: ModelSource, params: OnnxExportParams, facts: dict[str, Any]) -> None:
    """Add configuration, tokenizer, usage example and ``onnx_export.json`` to the exported model.

    Files about the whole model are also written beside the folder of layers, where other stages look for them.
    """
    for place in _places(folder, params):
        copy_companions(source.folder, place)
    example = _EXAMPLES.get(source.family, "text.py")
    if params.layered:
        example = "decoder_layered.py"
    elif "images" in facts.get("parts", ()):
        example = "decoder_with_pictures.py"
    elif source.family is DECODER and not params.cache:
        example = "decoder_without_cache.py"
    elif source.family is DECODER and params.past_present_share_buffer:
        example = "decoder_shared_buffer.py"
    elif source.family is DECODER and params.shapes == "static":
        example = "decoder_static.py"
    shutil.copyfile(Path(__file__).parents[1] / "examples" / example, folder / "example.py")
    record = {
        **facts,
        "model_type": source.config.model_type,
        "optimization": params.optimization,
        **({} if params.provider == "auto" else {"provider": params.provider}),
        **({"packaging": params.packaging} if params.packaging else {}),
        "versions": {name: installed_version(name) for name in LIBRARIES},
    }
    text = json.dumps(record, indent=2, sort_keys=True)
    for place in _places(folder, params):
        (place / "onnx_export.json").write_text(text + "\n", encoding="utf-8")


def _places(folder: Path, params: OnnxExportParams) -> tuple[Path, ...]:
    return (folder, folder.parent) if params.layered else (folder,)


def metadata_of(source: ModelSource, *, lineage: str) -> dict[str, str]:
    """Return the properties of each graph's file: the model, the tools that made the file, and its lineage.

    Args:
        source: The model's folder.
        lineage: Digest of the artifact with that folder; empty if it is not known, and then there is no such property.
    """
    return {
        "architecture": source.architecture,
        "model_type": str(source.config.model_type),
        "family": source.family.name,
        "tools": ", ".join([f"slipway {own_version()}", *(f"{name} {installed_version(name)}" for name in LIBRARIES)]),
        **({"lineage": lineage} if lineage else {}),
    }
