"""Run the reference: base + adapter, unmerged, in float32; the base itself if there is no adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slipway.stage import Context
from slipway.validation.findings import Reference
from slipway.validation.speed import Engine, Speed
from slipway_validate.continuing import long_spec
from slipway_validate.folders import stored_dtype
from slipway_validate.judging.compare import CaseResults, compare_case
from slipway_validate.judging.evaluate import MERGED
from slipway_validate.judging.limits import level_of
from slipway_validate.judging.reference_run import ReferenceRun
from slipway_validate.params import ValidateParams
from slipway_validate.preparation import Prepared, require_success
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import RunResult, RunSpec, Spec

DESCRIPTION = "base + adapter, unmerged (peft), computed in float32 by transformers on the CPU"
PLAIN = "the base model itself, without an adapter, computed in float32 by transformers on the CPU"
RUNTIME = "slipway_validate.runner.runtime_reference:load"
NOT_COMPARED = "not run: compare_outputs is off, so outputs were only loaded and run"


@contextmanager
def run_reference(
    inputs: Mapping[str, Path], prepared: Prepared, params: ValidateParams, ctx: Context, *, folder: Path
) -> Iterator[tuple[ReferenceRun, process.Runner]]:
    """Run the reference; within the context its process waits to be timed beside the outputs.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the reference cannot be loaded, or its logits are not finite.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    spec = prepared.spec(RUNTIME, inputs["base"], params=params, threads=ctx.threads)
    if "adapter" in inputs:
        spec = spec.model_copy(update={"adapter": inputs["adapter"].absolute()})
    spec = spec.model_copy(update={"long": long_spec(prepared, inputs["base"], params)})
    timeout = params.output_timeout_seconds
    with process.start_runner(Spec(run=spec), folder, ctx, label="reference", timeout_seconds=timeout) as runner:
        yield _checked_run(runner.result, spec, inputs, prepared=prepared, folder=folder), runner


def _checked_run(
    result: RunResult, spec: RunSpec, inputs: Mapping[str, Path], *, prepared: Prepared, folder: Path
) -> ReferenceRun:
    """Return the reference's run after checking that outputs can be compared with it."""
    remedy = "check that base model and checkpoint belong together and are complete"
    name = "base + adapter" if spec.adapter else "the base model"
    require_success(result, what=f"{name}, the reference, cannot be run", remedy=remedy)
    if result.non_finite:
        message = f"its results contain NaN or infinity, first in {result.first_non_finite}"
        broken = result.model_copy(update={"status": "failed", "message": message})
        require_success(broken, what=f"{name} cannot be a reference", remedy="check for NaN weights")
    run = ReferenceRun(
        folder=folder,
        result=result,
        family=prepared.family,
        samples=prepared.samples,
        with_adapter=spec.adapter is not None,
        merged_level=level_of(stored_dtype(inputs[MERGED] if MERGED in inputs else inputs["base"])),
    )
    where = CaseResults(folder, folder, run.measure)
    return run.with_figures([compare_case(case, where) for case in spec.cases if case.name not in result.skipped_cases])


def describe(run: ReferenceRun | None, speed: Speed | None) -> Reference:
    """Describe the reference for the report; without a run, say that outputs were not compared."""
    if run is None:
        return Reference(description=NOT_COMPARED, engine=Engine(runtime=""))
    effect = run.adapter_effect
    return Reference(
        description=DESCRIPTION if run.with_adapter else PLAIN,
        architecture=run.result.architecture,
        adapter=run.result.adapter,
        engine=run.result.engine or Engine(runtime="transformers"),
        perplexity=run.perplexity,
        base_perplexity=run.base_perplexity,
        gain_per_window=run.gain_per_window,
        adapter_effect_kl=effect.mean_kl if effect else None,
        adapter_effect_error=effect.relative_error if effect else None,
        logit_scale=run.logit_scale,
        arithmetic_noise=run.noise,
        memory=run.result.memory,
        load_seconds=run.result.load_seconds,
        speed=speed,
    )
