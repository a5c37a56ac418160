"""Quantize a folder from start to end: check the input, copy the other files, write the weights, report, check the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.errors import QuantizationError
from slipway.formats.registry import load_format
from slipway.levels import LEVELS
from slipway.model.folder import ModelFolder
from slipway.parts import Part
from slipway.stage import Context
from slipway_quantize.calibrated import Calibration, mismatch_error
from slipway_quantize.check import check_result
from slipway_quantize.divided import PartWork, write_record
from slipway_quantize.experts import experts_refusal
from slipway_quantize.levels import CASTS, size_budget_error
from slipway_quantize.params import QuantizeParams
from slipway_quantize.quantizer import QuantizeRequest, load_packager, load_quantizer
from slipway_quantize.report import Outcome, copy_companions, read_json, weight_bytes, write_json, write_report
from slipway_quantize.sensitive import allowed_names


@dataclass(frozen=True)
class _Made:
    """What was written: the outcome, the settings for the report, and the size of the source's weights."""

    outcome: Outcome
    settings: dict[str, Any]
    before: int


def quantize(inputs: Mapping[str, Path], target: Path, params: QuantizeParams, ctx: Context) -> None:
    """Write ``inputs["model"]`` at ``params.level`` into the empty folder ``target``, with the integers of ``inputs["calibration"]`` if given.

    If that folder leaves its weights out, the inputs of the task that made it are among ``inputs``.

    Raises:
        QuantizationError: With the reasons listed in the package's README.
        CheckpointValidationError: ``BASE_MODEL_INVALID``: the folder has no configuration of a model.
    """
    made = _make(inputs, target, params, ctx)
    if params.size_budget is not None and params.size_budget.is_asked:
        _require_small(target, made.outcome)
    after = weight_bytes(target)
    write_report(target, made.outcome, before=made.before, after=after, settings=made.settings, ctx=ctx)
    if packager := load_packager(params.format):
        packager(target, level=params.level, ctx=ctx)
    if params.check:
        check_result(made.before, target, run=load_quantizer(params.format).run, ctx=ctx)


def quantize_part(inputs: Mapping[str, Path], params: QuantizeParams, part: Part, ctx: Context) -> Path:
    """Write one part's range of the files that :func:`quantize` writes; the first part writes the small files, too. Return the folder.

    Raises:
        QuantizationError, CheckpointValidationError: As :func:`quantize`.
    """
    output = ctx.workdir / "part"
    output.mkdir()
    small = output if part.is_first else ctx.workdir / "small"
    small.mkdir(exist_ok=True)
    work = PartWork(part, output)
    made = _make(inputs, small, params, ctx, work)
    write_record(
        work,
        made.outcome,
        params=params.model_dump(mode="json"),
        settings=made.settings,
        before_bytes=made.before,
        other_bytes=weight_bytes(small) - (sum(file.nbytes for file in work.files) if part.is_first else 0),
        ctx=ctx,
    )
    return output


def _make(
    inputs: Mapping[str, Path], target: Path, params: QuantizeParams, ctx: Context, work: PartWork | None = None
) -> _Made:
    """Check the input, and write the small files and the weights."""
    _refuse_level(params)
    model = ModelFolder.open(inputs["model"])
    source = model.path
    _refuse_quantized(model)
    _refuse_unread_experts(model, params)
    copy_companions(source, target)
    quantizer, runtime = load_quantizer(params.format), load_format(params.format).runtime
    settings: dict[str, Any] = {"format": params.format, "level": params.level}
    if allowed := allowed_names(params.keep):
        settings["allowed"] = list(allowed)  # the validation does not take these for a fault
    folder = inputs.get("calibration") if params.calibrated else None
    calibration = _load_calibration(folder, params, ctx) if folder is not None else None
    request = QuantizeRequest(model, target, params, ctx, inputs, calibration, work)
    outcome = quantizer.write(request)
    if calibration is not None:
        settings["calibration"] = ctx.input_digests.get("calibration", "")
    if params.integers is not None:
        settings |= {"group_size": params.group_size, "packed": params.packed}
        settings |= {"mixed": True} if params.keep else {}
    if len(set(outcome.bits.values())) > 1:
        settings["mixed"] = True
    if runtime is not None and runtime.precision_file:
        _note_precision(target / runtime.precision_file, params.level)
    return _Made(outcome, settings, weight_bytes(source) + outcome.left_out_bytes)


def _refuse_unread_experts(model: ModelFolder, params: QuantizeParams) -> None:
    """Refuse a level whose experts nothing here reads right, unless nobody asks whether they are."""
    level = LEVELS[params.level]
    if params.format != "pytorch" or not params.packed or not params.check or level.name in CASTS:
        return
    if why := experts_refusal(level, params.keep, model.config):
        raise QuantizationError(
            why,
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="leave this level out for this model; slipway stage quantize --param check=false writes it for vLLM, unproven",
            about={"level": level.name},
        )


def _load_calibration(folder: Path, params: QuantizeParams, ctx: Context) -> Calibration:
    if params.integers is None or not load_format(params.format).quantization.calibrated:
        raise mismatch_error(f"{params.format} at level {params.level} takes none")
    calibration = Calibration(folder, params.integers)
    if load_format(params.format).is_model:
        calibration.require_model(ctx.input_digests.get("model", ""))
    return calibration


def _require_small(target: Path, outcome: Outcome) -> None:
    """Refuse a result that exceeds its size budget, or whose quantizer has no mixed precision."""
    plan = outcome.details.get("mixed_precision")
    if plan is None:
        raise QuantizationError(
            "this format has no mixed precision, so it cannot keep to a size budget",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="set no size budget, or leave the level out of this format",
        )
    size = weight_bytes(target)
    if size > plan["size_budget_bytes"]:
        raise size_budget_error(plan["size_budget_bytes"], plan["smallest_bytes"] + size - plan["planned_bytes"])


def _note_precision(path: Path, level: str) -> None:
    """Write the new precision into the copied description of the export, which still says float32."""
    if path.is_file():
        write_json(path, {**read_json(path), "precision": level})


def _refuse_level(params: QuantizeParams) -> None:
    """Refuse a level that the format lacks."""
    output_format = load_format(params.format)
    if params.level in output_format.levels:
        return
    refused = output_format.quantization.refused.get(params.level)
    raise QuantizationError(
        f"{params.level} is not made for {output_format.title}" + (f": {refused.why}" if refused else ""),
        reason="QUANTIZATION_UNSUPPORTED",
        remedy=f"use {refused.instead}" if refused else f"use one of {', '.join(output_format.levels)}",
        about={"format": params.format, "level": params.level},
    )


def _refuse_quantized(model: ModelFolder) -> None:
    quantization, report = model.config.quantization, model.path / "quantization.json"
    method = read_json(report).get("level") if report.is_file() else None
    method = method or (quantization.get("quant_method", "by an unnamed method") if quantization else None)
    if method:
        raise QuantizationError(
            f"the model is already quantized ({method})",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="quantize the merged or exported model in its original precision",
            about={"quantization": method},
        )
