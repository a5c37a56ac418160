"""Copy the files beside the weights, and read and write JSON files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.errors import QuantizationError
from slipway.files import json_documents
from slipway.files.links import all_files
from slipway.model.sentences import sentence_files
from slipway.model.weights.reading import DEFERRED

_WEIGHTS = (
    DEFERRED,
    ".safetensors",
    ".safetensors.index.json",
    ".onnx",
    ".onnx.data",
    ".onnx_data",
    ".bin",
    ".pt",
    ".pth",
)


def copy_companions(source: Path, target: Path) -> None:
    """Copy every file of ``source`` that holds no weights (config, tokenizer, chat template, example, metadata)."""
    further = {path.relative_to(source).as_posix() for path in sentence_files(source)}  # some have weights
    for name, path in all_files(source):
        if name in further or (not name.endswith(_WEIGHTS) and ".onnx_data_" not in name):
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)  # content only: inputs may be read-only


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises:
        QuantizationError: ``BASE_MODEL_INVALID`` if the file is missing or does not hold an object.
    """
    try:
        return json_documents.read_json_object(path, largest=json_documents.LARGEST_LIST, lenient=True)
    except (OSError, ValueError) as error:
        raise QuantizationError(
            f"{path.name} cannot be read ({error})",
            reason="BASE_MODEL_INVALID",
            remedy="give a complete model folder",
            about={"file": path.name},
        ) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` indented and in the order of its keys."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
