"""Tell the data type of a folder's stored weights, from its headers and JSON files only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from slipway.errors import CheckpointValidationError
from slipway.files.json_documents import read_object_or_empty
from slipway.formats.registry import runtimes_to_try
from slipway.levels import LEVELS
from slipway.model.dtypes import DTYPES
from slipway.model.safetensors_file import read_safetensors


def stored_dtype(folder: Path) -> str:
    """Return the data type of the stored weights, from headers and JSON files.

    The level of a quantized folder (in ``quantization.json``), otherwise the type of most bytes in its safetensors files,
    otherwise the precision in a file of its format. Empty if unknown.
    """
    noted = read_object_or_empty(folder / "quantization.json").get("level")
    if isinstance(noted, str) and noted in LEVELS:
        return LEVELS[noted].dtype
    safetensors = safetensors_dtype(folder)
    if safetensors:
        return safetensors
    runtimes = [runtime for _, runtime in reversed(runtimes_to_try())]
    for runtime in runtimes:
        noted = (
            read_object_or_empty(folder / runtime.precision_file).get("precision") if runtime.precision_file else None
        )
        if noted:
            known = LEVELS.get(str(noted))
            return known.dtype if known else {"fp32": "float32"}.get(str(noted), str(noted))
    return next(
        (runtime.stored_dtype for runtime in runtimes if runtime.stored_dtype and runtime.recognises(folder)), ""
    )


def safetensors_dtype(folder: Path) -> str:
    """Return the data type of most bytes in a folder's safetensors files; empty without such files."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors = read_safetensors(path).tensors
        except CheckpointValidationError:  # loading the model will report the error
            continue
        for tensor in tensors.values():
            counts[tensor.dtype] += tensor.nbytes
    if not counts:
        return ""
    most = max(sorted(counts), key=lambda dtype: counts[dtype])
    return DTYPES[most].torch or most.lower()
