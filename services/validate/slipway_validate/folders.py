"""What a model folder holds, read from its headers and JSON files only: nothing heavy is imported or loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from slipway.errors import CheckpointValidationError
from slipway.files import json_documents
from slipway.formats import Runtime
from slipway.formats.registry import format_of_output, formats, split_output
from slipway.models.dtypes import DTYPES
from slipway.models.families import Family, described, family_of
from slipway.models.model_files import CONFIG
from slipway.models.safetensors_file import read_safetensors
from slipway_validate.protocol.messages import RunResult

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
    name_of_format, level = split_output(name)
    return name_of_format, level or "none"


def runtime_for(name: str, folder: Path) -> Runtime | None:
    """Return how an output is run: by its format's way if its folder looks like one, otherwise by that of the format it looks like.

    None where no installed format recognises the folder, and where the output's own format has no way to be run.
    """
    named = format_of_output(name)
    if named is not None and named.runtime is None:
        return None
    candidates = [named, *reversed(formats().values())]
    runtimes = [each.runtime for each in candidates if each is not None and each.runtime is not None]
    return next((runtime for runtime in runtimes if runtime.recognises(folder)), None)


def why_not_run(name: str, folder: Path, runtime: Runtime | None, family: Family) -> RunResult | None:
    """The result of an output that cannot be run: failed where it is known what is wrong with it, otherwise not run. None if it can."""
    if runtime is None:
        return _without_runtime(name)
    if runtime.families is not None and family.name not in runtime.families:
        known = " and ".join(runtime.families)
        message = f"the model is of the family {family.name}, and {runtime.name} runs {known} outputs only so far"
        return RunResult(status="not_run", message=message)
    config = read_json(folder / CONFIG)
    if family_of(config) in (family, None):
        return None
    message = f"its {CONFIG} says {described(config)}, and the base model is a {family.name}"
    return RunResult(status="failed", reason="VALIDATION_IMPOSSIBLE", message=message)


def _without_runtime(name: str) -> RunResult:
    named = format_of_output(name)
    if named is None:
        return RunResult(status="not_run", message=f"no installed format recognises the output {name}")
    if named.runtime is None:
        return RunResult(status="not_run", message=f"the format {named.name} has no way to run its outputs yet")
    message = f"its folder has no {' or '.join(named.runtime.files)} file"
    return RunResult(status="failed", reason="VALIDATION_IMPOSSIBLE", message=message)


def stored_dtype(folder: Path) -> str:
    """Data type of the stored weights, as far as headers tell.

    The level of a quantized folder (``quantization.json`` or its ``quantization_config``), otherwise the type that most
    bytes of its safetensors files have, otherwise the precision that a file of its format notes. Empty when unknown.
    """
    noted = read_json(folder / "quantization.json").get("level")
    if isinstance(noted, str) and noted in LEVEL_DTYPES:
        return LEVEL_DTYPES[noted]
    safetensors = safetensors_dtype(folder)
    if safetensors:
        return safetensors
    runtimes = [each.runtime for each in formats().values() if each.runtime is not None]
    for runtime in runtimes:
        noted = read_json(folder / runtime.precision_file).get("precision") if runtime.precision_file else None
        if noted:
            return LEVEL_DTYPES.get(str(noted), {"fp32": "float32"}.get(str(noted), str(noted)))
    return next(
        (runtime.stored_dtype for runtime in runtimes if runtime.stored_dtype and runtime.recognises(folder)), ""
    )


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
