"""Run the reference: base + adapter, unmerged, in float32; the base itself if there is no adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from pydantic import TypeAdapter

from slipway.model.configuration import ModelConfig
from slipway.stage import Context
from slipway.validation.findings import AdapterEvidence
from slipway_validate.continuing import long_spec
from slipway_validate.folders import stored_dtype
from slipway_validate.judging.compare import CaseResults, compare_case
from slipway_validate.judging.evaluate import MERGED
from slipway_validate.judging.limits import level_of
from slipway_validate.judging.reference_run import ReferenceRun
from slipway_validate.params import SampleParams
from slipway_validate.preparation import Prepared, require_success
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import Benchmark, RunResult, RunSpec, Spec, SurvivalSpec, Yardsticks
from slipway_validate.reference.files import NoReferenceError
from slipway_validate.samples import EVIDENCE_FILE

_EVIDENCE = TypeAdapter(tuple[AdapterEvidence, ...])
RUNTIME = "slipway_validate.runner.runtime_reference:load"


@contextmanager
def run_reference(
    inputs: Mapping[str, Path],
    prepared: Prepared,
    params: SampleParams,
    ctx: Context,
    *,
    folder: Path,
    benchmark: Benchmark | None = None,
) -> Iterator[tuple[ReferenceRun, process.Runner]]:
    """Run the reference; within the context, with a benchmark, its process waits to be timed beside the outputs.

    Raises:
        NoReferenceError: The adapter has tensors whose places in the model are unknown.
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the reference cannot be loaded, or its logits are not finite.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    spec = reference_spec(inputs, prepared, params, ctx).model_copy(update={"benchmark": benchmark})
    long = long_spec(prepared, ModelConfig.read(inputs["base"]), params)
    if params.continuation_tokens and long is not None and long.new_tokens < params.continuation_tokens:
        ctx.warn(
            f"long continuations have {long.new_tokens} of {params.continuation_tokens} tokens: more do not fit the model or max_logit_bytes"
        )
    spec = spec.model_copy(update={"long": long})
    timeout = params.output_timeout_seconds
    with process.start_runner(Spec(run=spec), folder, ctx, label="reference", timeout_seconds=timeout) as runner:
        yield _checked_run(runner.result, spec, inputs, prepared=prepared, folder=folder), runner


def start_timing(
    inputs: Mapping[str, Path],
    prepared: Prepared,
    params: SampleParams,
    ctx: Context,
    *,
    folder: Path,
    benchmark: Benchmark,
    survival: SurvivalSpec | None,
    yardsticks: Yardsticks | None,
) -> AbstractContextManager[process.Runner]:
    """Start the process that loads the reference only to be timed beside the outputs: what it computes is known.

    It compares the stored weights too, because it has imported the libraries for that. Nothing is waited for.
    """
    spec = reference_spec(inputs, prepared, params, ctx)
    spec = spec.model_copy(update={"benchmark": benchmark, "only_timed": True, "cases": (), "prompts": ()})
    timeout = params.output_timeout_seconds
    return process.start_runner(
        Spec(run=spec, survival=survival, yardsticks=yardsticks),
        folder,
        ctx,
        label="stored weights",
        timeout_seconds=timeout,
    )


def read_evidence(folder: Path) -> tuple[AdapterEvidence, ...]:
    """Return what a runner measured on text like that of the training; empty if there was none."""
    file = folder / EVIDENCE_FILE
    return _EVIDENCE.validate_json(file.read_bytes()) if file.is_file() else ()


def merged_level(inputs: Mapping[str, Path]) -> str:
    """Return the row of the limits for the merge's data type; before the merge, that of the base."""
    return level_of(stored_dtype(inputs[MERGED] if MERGED in inputs else inputs["base"]))


def reference_spec(inputs: Mapping[str, Path], prepared: Prepared, params: SampleParams, ctx: Context) -> RunSpec:
    """Return what the reference computes."""
    spec = prepared.spec(RUNTIME, inputs["base"], params=params, threads=ctx.threads)
    return spec.model_copy(update={"adapter": inputs["adapter"].absolute()}) if "adapter" in inputs else spec


def _checked_run(
    result: RunResult, spec: RunSpec, inputs: Mapping[str, Path], *, prepared: Prepared, folder: Path
) -> ReferenceRun:
    """Return the reference's run after checking that outputs can be compared with it."""
    if result.status == "not_run" and result.reason:
        raise NoReferenceError(result.message, reason=result.reason)
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
        merged_level=merged_level(inputs),
        evidence=read_evidence(folder),
    )
    where = CaseResults(folder, folder, run.measure)
    return run.with_figures([compare_case(case, where) for case in spec.cases if case.name not in result.skipped_cases])
