"""The reference: base + adapter, unmerged, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slipway.stage import Context
from slipway.validation.findings import Engine, Reference, Speed
from slipway_validate.folders import stored_dtype
from slipway_validate.judging.compare import CaseLogits, compare_case
from slipway_validate.judging.evaluate import MERGED, ReferenceRun
from slipway_validate.judging.limits import level_of
from slipway_validate.params import ValidateParams
from slipway_validate.preparation import Prepared, require
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import RunResult, RunSpec, Spec

DESCRIPTION = "base + adapter, unmerged (peft), computed in float32 by transformers on the CPU"
RUNTIME = "slipway_validate.runner.runtime_reference:load"
NOT_COMPARED = "not run: compare_outputs is off, so outputs were only loaded and run"


@contextmanager
def run_reference(
    inputs: Mapping[str, Path], prepared: Prepared, params: ValidateParams, ctx: Context, *, folder: Path
) -> Iterator[tuple[ReferenceRun, process.Runner]]:
    """Run it; its process waits within the context, to be timed beside the outputs.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: it cannot be loaded, or its logits are not finite.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    spec = prepared.spec(RUNTIME, inputs["base"], params=params, threads=ctx.threads)
    spec = spec.model_copy(update={"adapter": inputs["adapter"].absolute()})
    timeout = params.output_timeout_seconds
    with process.started(Spec(run=spec), folder, ctx, label="reference", timeout_seconds=timeout) as runner:
        yield _checked(runner.result, spec, inputs, prepared=prepared, folder=folder), runner


def _checked(
    result: RunResult, spec: RunSpec, inputs: Mapping[str, Path], *, prepared: Prepared, folder: Path
) -> ReferenceRun:
    """What it found, if outputs can be compared with it."""
    remedy = "check that base model and checkpoint belong together and are complete"
    require(result, what="base + adapter, the reference, cannot be run", remedy=remedy)
    if result.non_finite:
        message = f"its logits contain NaN or infinity, first in {result.first_non_finite}"
        broken = result.model_copy(update={"status": "failed", "message": message})
        require(broken, what="base + adapter cannot be a reference", remedy="check both for NaN weights")
    run = ReferenceRun(
        folder=folder,
        result=result,
        tokens=prepared.tokens,
        merged_level=level_of(stored_dtype(inputs[MERGED] if MERGED in inputs else inputs["base"])),
    )
    logits = run.logits
    where = CaseLogits(folder, logits, logits)
    cases = [compare_case(case, where) for case in spec.cases if case.name not in result.skipped_cases]
    return run.completed(noise=max((case.self_max_abs_diff or 0.0 for case in cases), default=None))


def describe(run: ReferenceRun | None, speed: Speed | None) -> Reference:
    """For the report; a run of None says that outputs were not compared."""
    if run is None:
        return Reference(description=NOT_COMPARED, engine=Engine(runtime=""))
    return Reference(
        description=DESCRIPTION,
        architecture=run.result.architecture,
        adapter=run.result.adapter,
        engine=run.result.engine or Engine(runtime="transformers"),
        perplexity=run.perplexity,
        base_perplexity=run.base_perplexity,
        gain_per_window=run.gain_per_window,
        adapter_effect_kl=run.adapter_effect_kl,
        logit_scale=run.logit_scale,
        arithmetic_noise=run.noise,
        memory=run.result.memory,
        load_seconds=run.result.load_seconds,
        speed=speed,
    )
