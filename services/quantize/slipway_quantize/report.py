"""The files beside the weights of a quantized folder: copies, JSON, and ``quantization.json``.

The last one has each weight's outcome, which is also among the facts of the export's report.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.errors import QuantizationError
from slipway.files import json_documents
from slipway.files.paths import all_files
from slipway.files.regular_file import distinct_bytes
from slipway.model.sentences import sentence_files
from slipway.model.weights.reading import DEFERRED
from slipway.stage import Context
from slipway.texts import counted

_SHOWN = 8
KEPT = "asked for by keep"
"""Why a weight keeps its type, in ``quantization.json``."""

_WEIGHT_ENDINGS = (
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


@dataclass
class Outcome:
    """The result for each weight.

    Attributes:
        method: How the level is represented, for example ``compressed-tensors pack-quantized``.
        quantized: Names of the weights that now have the level's type.
        kept: Names of the unchanged weights, with the reason.
        left_out_bytes: Size of the weights that the source leaves out.
        error_energy: Squared error added to the weights, and ``weight_energy`` their squared sum (int levels).
        details: Further facts of the format.
        methods: How the integers of each weight were chosen, by its name, if some were by a calibration.
        bits: Bits of each weight, by its name, in mixed precision.
    """

    method: str
    quantized: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    left_out_bytes: int = 0
    error_energy: float = 0.0
    weight_energy: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)
    bits: dict[str, int] = field(default_factory=dict)


def write_report(
    target: Path, outcome: Outcome, *, before: int, after: int, settings: Mapping[str, Any], ctx: Context
) -> None:
    """Write ``quantization.json`` into ``target`` and record its facts.

    Sizes are of the weight files alone, in bytes; ``reduction`` is the share saved (0.5 = half the size);
    ``relative_weight_error`` is the square root of the error's energy divided by that of the weights.

    Args:
        target: The folder.
        outcome: The result for each weight.
        before: Bytes of the source's weights, whether stored or left out.
        after: Bytes of the written weights.
        settings: Parameters to write first.
        ctx: Context of the stage.
    """
    reduction = round(1 - after / before, 4) if before else 0.0
    facts: dict[str, Any] = {
        "method": outcome.method,
        "size_before_bytes": before,
        "size_after_bytes": after,
        "reduction": reduction,
        "tensors_quantized": len(outcome.quantized),
        "tensors_kept": len(outcome.kept),
        **outcome.details,
    }
    if outcome.weight_energy:
        facts["relative_weight_error"] = round((outcome.error_energy / outcome.weight_energy) ** 0.5, 6)
    if outcome.methods:
        facts["weights_by_method"] = dict(sorted(Counter(outcome.methods.values()).items()))
    tensors: dict[str, Any] = {"quantized": sorted(outcome.quantized), "kept": dict(sorted(outcome.kept.items()))}
    if outcome.methods:
        tensors["methods"] = dict(sorted(outcome.methods.items()))
    if outcome.bits:
        tensors["bits"] = dict(sorted(outcome.bits.items()))
    write_json(target / "quantization.json", {**settings, **facts, "tensors": tensors})
    ctx.record(**facts)


def weight_bytes(folder: Path) -> int:
    """Return the bytes of the folder's weight files (safetensors, ONNX graphs and their data)."""
    patterns = ("*.safetensors", "*.onnx", "*.onnx.data", "*.onnx_data")
    return distinct_bytes(path for pattern in patterns for path in folder.rglob(pattern))


def warn_unaligned(names: list[str], group_size: int, ctx: Context) -> None:
    """Warn about the weights that were not quantized because of the group size."""
    if names:
        shown = ", ".join(sorted(names)[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
        ctx.warn(
            f"{counted(len(names), 'weight')} kept the original precision, because an input width is not a multiple of the "
            f"group size {group_size}: {shown}; choose a group size that divides it"
        )


def warn_unknown(wanted: Iterable[str], found: Iterable[str], ctx: Context) -> None:
    """Warn of names in ``keep`` that no linear layer has."""
    known = [f".{module}" for module in found]
    unknown = sorted(
        name for name in wanted if not any(one.endswith(f".{name}") or f".{name}".endswith(one) for one in known)
    )
    if unknown:
        ctx.warn(f"keep names {counted(len(unknown), 'linear layer')} that the model lacks, first {unknown[0]!r}")


def copy_companions(source: Path, target: Path) -> None:
    """Copy every file of ``source`` that holds no weights (config, tokenizer, chat template, example, metadata)."""
    further = {path.relative_to(source).as_posix() for path in sentence_files(source)}  # some have weights
    for name, path in all_files(source):
        if name in further or (not name.endswith(_WEIGHT_ENDINGS) and ".onnx_data_" not in name):
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
