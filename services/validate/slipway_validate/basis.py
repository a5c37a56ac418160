"""Prepare what all outputs of a validation are compared with: the samples, the reference, and the passes with which outputs are measured."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from slipway.errors import ValidationError
from slipway.model.families import Family
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_validate.by_layers import ALONE, Memory
from slipway_validate.folders import float32_bytes
from slipway_validate.judging.distances import limits_by_level
from slipway_validate.judging.yardsticks import ReferenceRun, plan_yardsticks
from slipway_validate.params import ValidateParams
from slipway_validate.preparation import Prepared, benchmark_of, prepare, tokenizer_folder
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import Yardsticks
from slipway_validate.reference.files import read_reference
from slipway_validate.reference.running import (
    merged_level,
    reference_spec,
    run_reference,
    start_timing,
    warn_of_reference,
)
from slipway_validate.speed import NO_REFERENCE, QUICK
from slipway_validate.stored_weights import survival_spec

REFERENCE = "reference"
TIMING = "timing"
"""Folder of the process that times the reference."""
_OF_MACHINE = ("output_timeout_seconds", "by_layers")
"""Parameters that are not of the samples."""


@dataclass(frozen=True)
class Basis:
    """The samples, and the reference with which all outputs are compared and timed.

    Attributes:
        prepared: The samples.
        params: The parameters; those of the samples are the reference's.
        reference: The run of the reference; None if outputs are not compared.
        waiting: The process of the reference that is timed; None if outputs are timed alone.
        alone: Why outputs are timed alone, if they are.
        memory: What processes may use.
        warnings: Warnings of the stage that ran the reference.
        yardsticks: The passes with which outputs are measured.
    """

    prepared: Prepared
    params: ValidateParams
    memory: Memory
    reference: ReferenceRun | None = None
    waiting: process.Runner | None = None
    alone: str = NO_REFERENCE
    warnings: tuple[str, ...] = ()
    yardsticks: Yardsticks | None = None


def prepare_basis(
    trained: ModelFolder,
    inputs: Mapping[str, Path],
    family: Family,
    params: ValidateParams,
    ctx: Context,
    *,
    base: ModelFolder,
    outputs: Mapping[str, Path],
    work: Path,
    running: ExitStack,
) -> Basis:
    """Read the reference if it is an input, otherwise run it; ``trained`` is the model that the adapter was trained on."""
    memory = Memory(params, ctx, weights=float32_bytes(base) // 4)
    if not params.compare_outputs:
        return Basis(prepare(inputs, trained, family, params, ctx, work=work), params, memory)
    why = memory.why_by_layers(inputs["base"], adapter=inputs.get("adapter"))
    timed = benchmark_of(params, trained.config, family) if params.evidence.beside_reference else None
    if REFERENCE not in inputs:
        prepared = prepare(inputs, trained, family, params, ctx, work=work)
        run = run_reference(
            inputs, prepared, params, ctx, base=base, folder=work / "reference", benchmark=timed, by_layers=why
        )
        reference, waiting = running.enter_context(run)
        warn_of_reference(reference, ctx)
        basis = _make_basis(inputs, reference, prepared, params, ctx, outputs=outputs, memory=memory)
        return replace(basis, waiting=waiting if timed and not why else None)
    reference, prepared, file = read_reference(
        inputs[REFERENCE],
        inputs=inputs,
        merged_level=merged_level(inputs),
        tokenizer=tokenizer_folder(inputs, trained),
        ctx=ctx,
    )
    if prepared.family is not family:
        message = f"the reference is a {prepared.family.name}, and the base model a {family.name}"
        raise ValidationError(message, reason="VALIDATION_IMPOSSIBLE", remedy="give the reference of this base model")
    params = params.model_copy(update={name: value for name, value in file.params if name not in _OF_MACHINE})
    basis = _make_basis(inputs, reference, prepared, params, ctx, outputs=outputs, memory=memory)
    basis = replace(basis, warnings=file.warnings)
    if timed is None or why:
        return replace(basis, alone=ALONE if why else basis.alone)
    survival, folder = survival_spec(inputs, limits_by_level(params.limits)), work / TIMING
    started = start_timing(
        inputs, prepared, params, ctx, folder=folder, benchmark=timed, survival=survival, yardsticks=basis.yardsticks
    )
    return replace(basis, waiting=running.enter_context(started))


def _make_basis(
    inputs: Mapping[str, Path],
    reference: ReferenceRun,
    prepared: Prepared,
    params: ValidateParams,
    ctx: Context,
    *,
    outputs: Mapping[str, Path],
    memory: Memory,
) -> Basis:
    """Plan the passes with which outputs are measured; what the reference did not continue, outputs do not either."""
    run, most, alone = reference_spec(inputs, prepared, params, ctx), params.logit_bytes, QUICK
    measured = plan_yardsticks(inputs, outputs, reference, run, threads=ctx.threads, logit_bytes=most)
    if measured is not None:
        makes = any(each.weights for each in measured.passes)
        why = memory.why_by_layers(inputs["base"], adapter=inputs.get("adapter"), makes_weights=makes)
        measured = measured.model_copy(update={"by_layers": bool(why)})
    if reference.result.by_layers:
        params, alone = params.model_copy(update={"greedy_prompts": 0, "continuation_tokens": 0}), ALONE
    return Basis(prepared, params, memory, reference, alone=alone, yardsticks=measured)
