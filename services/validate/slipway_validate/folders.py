"""Read facts about a model folder from its headers and JSON files only, without heavy imports and without loading it."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import CheckpointValidationError
from slipway.files.json_documents import read_object_or_empty
from slipway.files.regular_file import distinct_bytes
from slipway.formats import Runtime
from slipway.formats.registry import format_of_output, runtime_of_output, runtimes_to_try, split_output
from slipway.model.configuration import ModelConfig
from slipway.model.families import Family
from slipway.model.folder import ModelFolder
from slipway.model.model_files import CONFIG
from slipway.model.sentences import drop_language_head
from slipway_validate.protocol.messages import RunResult


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder, each once."""
    return distinct_bytes(path for path in folder.rglob("*") if path.is_file())


def format_and_level(name: str) -> tuple[str, str]:
    """Split an output's name: ``onnx-int8`` is format ``onnx`` at level ``int8``; ``pytorch`` has level ``none``."""
    name_of_format, level = split_output(name)
    return name_of_format, level or "none"


def runtime_for(name: str, folder: Path) -> Runtime | None:
    """Return the runtime of an output: its own format's if that recognises the folder, otherwise that of a format that does.

    None if no installed format recognises the folder, or if the output's own format has no runtime.
    """
    named, own = format_of_output(name), runtime_of_output(name)
    if named is not None and own is None:
        return None
    others = (runtime for _, runtime in runtimes_to_try())
    return next((runtime for runtime in (own, *others) if runtime is not None and runtime.recognises(folder)), None)


def has_separate_adapter(name: str) -> bool:
    """Return whether an output's format delivers the adapter alone: the output computes with the adapter and the base's weights."""
    runtime = runtime_of_output(name)
    return runtime is not None and runtime.on_base


def find_refusal(name: str, folder: Path, runtime: Runtime | None, family: Family) -> RunResult | None:
    """Return the result of an output that cannot be run: failed if its files are wrong, otherwise not run. None if it can be run."""
    if runtime is None:
        return _refuse_without_runtime(name)
    if runtime.families is not None and family.name not in runtime.families:
        known = " and ".join(runtime.families)
        message = f"the model's family is {family.name}, and {runtime.name} runs only {known} outputs so far"
        return RunResult(status="not_run", message=message)
    config = ModelConfig(drop_language_head(read_object_or_empty(folder / CONFIG), folder))
    if config.family in (family, None):
        return None
    message = f"its {CONFIG} describes another model ({config.description}): the base model is a {family.name}"
    return RunResult(status="failed", reason="VALIDATION_IMPOSSIBLE", message=message)


def _refuse_without_runtime(name: str) -> RunResult:
    named, own = format_of_output(name), runtime_of_output(name)
    if named is None:
        return RunResult(status="not_run", message=f"no installed format recognises the output {name}")
    if own is None:
        return RunResult(status="not_run", message=f"the format {named.name} has no runtime for its outputs yet")
    message = f"its folder has no {' or '.join(own.files)} file"
    return RunResult(status="failed", reason="VALIDATION_IMPOSSIBLE", message=message)


def float32_bytes(model: ModelFolder) -> int:
    """Return the size that a model's weights would have in float32; 0 if its files do not tell."""
    try:
        return sum(4 * tensor.numel for tensor in model.tensors.values())
    except CheckpointValidationError:  # loading the model will report the error
        return 0
