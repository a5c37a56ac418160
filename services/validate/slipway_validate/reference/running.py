"""Run the reference (base + adapter, unmerged, in float32; the base itself without an adapter), describe it, and store it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType

from pydantic import TypeAdapter

from slipway.errors import CheckpointValidationError
from slipway.model.families import DECODER
from slipway.model.folder import ModelFolder
from slipway.model.weights.parts import ModelPart
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import EVIDENCE_FILE, HEAD_FILE
from slipway.stage import Context
from slipway.validation.findings import AdapterEvidence, Reference
from slipway.validation.parts import MultiTokenHead
from slipway.validation.pictures import PictureEffect, Sense
from slipway.validation.speed import Engine, Speed
from slipway_validate.by_layers import LONGER, Memory, leave_out
from slipway_validate.folders import float32_bytes
from slipway_validate.judging.compare import CaseResults, compare_case
from slipway_validate.judging.distances import distance_of, level_of
from slipway_validate.judging.evaluate import MERGED
from slipway_validate.judging.routing import compare_base_routes
from slipway_validate.judging.yardsticks import ReferenceRun
from slipway_validate.params import SampleParams
from slipway_validate.preparation import (
    Prepared,
    count_pictures,
    long_spec,
    open_models,
    prepare,
    require_success,
    unknown_family,
)
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import Benchmark, RunResult, RunSpec, Spec, SurvivalSpec, Yardsticks
from slipway_validate.reference.files import NoReferenceError, write_nothing, write_reference

_EVIDENCE = TypeAdapter(tuple[AdapterEvidence, ...])
RUNTIME = "slipway_validate.runner.runtime_reference:load"

DESCRIPTION = "base + adapter, unmerged (peft), computed in float32 by transformers on the CPU"
PLAIN = "the base model itself, without an adapter, computed in float32 by transformers on the CPU"
NOT_COMPARED = "not run: compare_outputs is off, so outputs were only loaded and run"


@contextmanager
def run_reference(
    inputs: Mapping[str, Path],
    prepared: Prepared,
    params: SampleParams,
    ctx: Context,
    *,
    base: ModelFolder,
    folder: Path,
    benchmark: Benchmark | None = None,
    by_layers: str = "",
) -> Iterator[tuple[ReferenceRun, process.Runner]]:
    """Run the reference; with a benchmark, its process then waits within the context to be timed beside the outputs.

    ``by_layers`` is why it is computed layer by layer; empty for as a whole.

    Raises:
        NoReferenceError: The adapter has tensors whose places in the model are unknown.
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the reference cannot be loaded, or its logits are not finite.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    spec = reference_spec(inputs, prepared, params, ctx).model_copy(update={"benchmark": benchmark})
    long = long_spec(prepared, base.config, params)
    if params.continuation_tokens and long is not None and long.new_tokens < params.continuation_tokens:
        ctx.warn(
            f"long continuations have {long.new_tokens} of {params.continuation_tokens} tokens: more do not fit the model or max_logit_bytes"
        )
    drafting = prepared.family is DECODER and has_multi_token_head(base)
    pictures = count_pictures(base.config, prepared.family, params)
    spec = spec.model_copy(update={"long": long, "drafting": drafting, "pictures": pictures})
    timeout, said = params.output_timeout_seconds, ""
    if by_layers:
        spec, said = leave_out(spec, by_layers)
        timeout *= LONGER
        ctx.warn(f"the reference was {said}")
    with process.start_runner(Spec(run=spec), folder, ctx, label="reference", timeout_seconds=timeout) as runner:
        result = runner.result.model_copy(update={"by_layers": said})
        yield _check_run(result, spec, inputs, prepared=prepared, folder=folder), runner


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
    """Start the process that loads the reference only to be timed beside the outputs: its results are known.

    The process also compares the stored weights, because it has imported the libraries for that. This call does not wait for it.
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


def read_head(folder: Path) -> MultiTokenHead | None:
    """Return what a runner measured of the model's multi-token head; None if it has none."""
    file = folder / HEAD_FILE
    return MultiTokenHead.model_validate_json(file.read_bytes()) if file.is_file() else None


def has_multi_token_head(base: ModelFolder) -> bool:
    """Return whether a model stores tensors of a multi-token head; a folder that cannot be read fails elsewhere, with its reason."""
    try:
        return bool(base.parts[ModelPart.MULTI_TOKEN_HEAD])
    except (CheckpointValidationError, OSError):
        return False


def merged_level(inputs: Mapping[str, Path]) -> str:
    """Return the row of the limits for the merge's data type; before the merge, that of the base."""
    return level_of(stored_dtype(inputs[MERGED] if MERGED in inputs else inputs["base"]))


def reference_spec(inputs: Mapping[str, Path], prepared: Prepared, params: SampleParams, ctx: Context) -> RunSpec:
    """Return what the reference computes."""
    spec = prepared.spec(RUNTIME, inputs["base"], params=params, threads=ctx.threads)
    return spec.model_copy(update={"adapter": inputs["adapter"].absolute()}) if "adapter" in inputs else spec


def _check_run(
    result: RunResult, spec: RunSpec, inputs: Mapping[str, Path], *, prepared: Prepared, folder: Path
) -> ReferenceRun:
    """Return the reference's run after checking that outputs can be compared with it."""
    if result.status == "not_run":
        raise NoReferenceError(result.message, reason=result.reason or "VALIDATION_IMPOSSIBLE")
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
        multi_token_head=read_head(folder),
    )
    where = CaseResults(folder, folder, run.measure)
    return run.with_figures([compare_case(case, where) for case in spec.cases if case.name not in result.skipped_cases])


def describe(
    run: ReferenceRun | None, speed: Speed | None, *, beside: Mapping[Sense, PictureEffect] = MappingProxyType({})
) -> Reference:
    """Describe the reference for the report, with what it computes beside text; without a run, say that outputs were not compared."""
    if run is None:
        return Reference(description=NOT_COMPARED, engine=Engine(runtime=""))
    effect = run.adapter_effect
    return Reference(
        description="; ".join(filter(None, (DESCRIPTION if run.with_adapter else PLAIN, run.result.by_layers))),
        architecture=run.result.architecture,
        adapter=run.result.adapter,
        engine=run.result.engine or Engine(runtime="transformers"),
        perplexity=run.perplexity,
        base_perplexity=run.base_perplexity,
        gain_per_window=run.gain_per_window,
        evidence=run.evidence,
        multi_token_head=run.multi_token_head,
        routing=compare_base_routes(run.folder),
        pictures=beside.get(Sense.PICTURES),
        sound=beside.get(Sense.SOUND),
        adapter_effect_kl=effect.mean_kl if effect else None,
        adapter_effect_error=effect.relative_error if effect else None,
        logit_scale=run.logit_scale,
        arithmetic_noise=run.noise,
        memory=run.result.memory,
        load_seconds=run.result.load_seconds,
        speed=speed,
    )


def warn_of_reference(reference: ReferenceRun, ctx: Context) -> None:
    """Warn if the adapter hardly changes the results on this text, or has moved the model away from its multi-token head."""
    head = reference.multi_token_head
    if head is not None and head.warning:
        ctx.warn(head.warning)
    effect = distance_of(reference.adapter_effect)
    if effect is None or effect >= reference.measure.weak_effect:
        return
    kl = reference.adapter_effect.mean_kl if reference.adapter_effect else None
    shown = f"mean KL to the base {effect:.2g} nats/token" if kl is not None else f"relative change {effect**0.5:.2g}"
    ctx.warn(f"the adapter has almost no effect on this text ({shown}): give held-out text like its training data")


def make_reference(inputs: Mapping[str, Path], params: SampleParams, ctx: Context) -> Path:
    """Run the reference and return the folder of its results.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: see :func:`slipway_validate.reference.stage.run`.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    work, folder = ctx.workdir / "runs", ctx.workdir / "reference"
    work.mkdir()
    folder.mkdir()
    try:
        base, trained = open_models(inputs, work)
        family = trained.family
        if family is None:
            return _write_without_results(folder, params, ctx, why=unknown_family(trained.config))
        prepared = prepare(inputs, trained, family, params, ctx, work=work)
        why = Memory(params, ctx, weights=float32_bytes(base) // 4).why_by_layers(
            inputs["base"], adapter=inputs.get("adapter")
        )
        ran = run_reference(inputs, prepared, params, ctx, base=base, folder=work / "reference", by_layers=why)
        with ran as (run, _):
            pass
        warn_of_reference(run, ctx)
        write_reference(folder, run, prepared, params, ctx)
        ctx.record(samples=len(prepared.samples.tokens), perplexity=run.perplexity, adapter=run.result.adapter)
    except NoReferenceError as none:
        return _write_without_results(folder, params, ctx, why=none.message)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _write_without_results(folder: Path, params: SampleParams, ctx: Context, *, why: str) -> Path:
    """Write a reference without results; the validation gives the reason for every output."""
    write_nothing(folder, params, ctx, why=why)
    ctx.record(reference=f"none: {why}")
    return folder
