"""What a model folder holds, read from its headers and JSON files only: nothing heavy is imported or loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from slipway.errors import CheckpointValidationError
from slipway.files import json_documents
from slipway.models.dtypes import DTYPES
from slipway.models.safetensors_file import read_safetensors

LEVEL_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "int8": "int8", "int4": "int4"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when the file is missing or holds anything else."""
    try:
        return json_documents.read_json_object(path, largest=json_documents.LARGEST_LIST, lenient=True)
    except (OSError, ValueError):
        return {}


def size_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file())


def format_and_level(name: str) -> tuple[str, str]:
    """Split an output's name: ``onnx-int8`` is format ``onnx`` at level ``int8``; ``pytorch`` has level ``none``."""
    name_of_format, _, level = name.partition("-")
    return name_of_format, level or "none"


def stored_dtype(folder: Path) -> str:
    """Data type of the stored weights, as far as headers tell.

    The level of a quantized folder (``quantization.json`` or its ``quantization_config``), otherwise the type that most
    bytes of its safetensors files have, otherwise (ONNX) the precision its export noted. Empty when unknown.
    """
    noted = read_json(folder / "quantization.json").get("level")
    if isinstance(noted, str) and noted in LEVEL_DTYPES:
        return LEVEL_DTYPES[noted]
    safetensors = safetensors_dtype(folder)
    if safetensors:
        return safetensors
    for file in ("onnx_export.json", "engine.json"):
        precision = str(read_json(folder / file).get("precision", ""))
        if precision:
            return LEVEL_DTYPES.get(precision, {"fp32": "float32"}.get(precision, precision))
    return "float32" if (folder / "model.onnx").is_file() else ""


def safetensors_dtype(folder: Path) -> str:
    """The data type that most bytes of a folder's safetensors files have, empty without such files."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors = read_safetensors(path).tensors
        except CheckpointValidationError:  # loading it will say what is wrong with it
            continue
        for tensor in tensors.values():
            counts[tensor.dtype] += tensor.nbytes
    if not counts:
        return ""
    most = max(sorted(counts), key=lambda dtype: counts[dtype])
    return DTYPES[most].torch or most.lower()
