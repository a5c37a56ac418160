"""Run and time one output after the other, each in its own process, and tell which ones run the reference's code.

The next output imports its libraries meanwhile.

Which shapes a model gives wrong results in depends on how its code pads, masks, counts positions and keeps a cache, as its
configuration says, so an output that runs the reference's code skips the shape cases. Its weights are compared by the windows.
Where activations are rounded too, a row may depend on its neighbours, so nothing is known then.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.files.json_documents import read_object_or_empty
from slipway.formats import Runtime
from slipway.machine.cgroup import ControlGroup, available_memory
from slipway.model.model_files import CONFIG
from slipway.stage import Context
from slipway.validation.findings import OutputStatus, OutputValidation
from slipway.validation.speed import Speed
from slipway_validate.by_layers import LONGER, Memory, leave_out
from slipway_validate.folders import find_refusal, runtime_for
from slipway_validate.judging import texts
from slipway_validate.judging.texts import Texts
from slipway_validate.params import ValidateParams
from slipway_validate.preparation import Prepared
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import Benchmark, ExplainSpec, LongSpec, RunResult, RunSpec, Spec
from slipway_validate.protocol.process import Runner, start_runner
from slipway_validate.speed import NO_ROOM, Stopwatch

OUT_OF_MEMORY = ("STAGE_KILLED", "OUT_OF_MEMORY", "GPU_OUT_OF_MEMORY")
"""Failures of an output that a process beside it may have caused: the output is run again alone."""
LIBRARIES = 1 << 30
"""Most memory that libraries take in the two processes beside the one of an output."""

REFERENCE_CODE = "slipway.proof.transformers_runtime:load"
SAME_CODE = "the reference runs the same code with the same configuration, and was compared with itself in this shape"
_ABOUT_WEIGHTS = frozenset(
    {"_name_or_path", "dtype", "quantization_config", "tie_word_embeddings", "torch_dtype", "transformers_version"}
)
"""Settings that say only how weights are stored."""


@dataclass(frozen=True, slots=True)
class OutputRun:
    """An output that was run.

    Attributes:
        name: Its name.
        model: Its folder.
        spec: What was computed.
        folder: Folder of its process.
        result: What the process said.
        speed: Its speed; None if it was not timed.
        note: Why it has no speed, or what else was not computed; empty otherwise.
    """

    name: str
    model: Path
    spec: RunSpec
    folder: Path
    result: RunResult
    speed: Speed | None = None
    note: str = ""


def has_room(model_bytes: int, params: ValidateParams, ctx: Context, *, work: Path) -> bool:
    """Return whether memory and disk suffice for the next process, and for its logits, while an output is still judged.

    Args:
        model_bytes: Size of the model in float32, the largest that an output computes in.
        params: The stage's parameters.
        ctx: The stage's context.
        work: Folder of the logits.
    """
    needed = 2 * model_bytes + LIBRARIES
    memory = min(available_memory(ControlGroup().memory()), ctx.max_memory_bytes)
    return needed <= memory and shutil.disk_usage(work).free > 2 * params.logit_bytes


@dataclass(frozen=True, slots=True)
class _Planned:
    """An output to run; one with a ``refusal`` is not run. ``left_out`` names what is not computed of it."""

    name: str
    model: Path
    spec: RunSpec
    folder: Path
    label: str
    refusal: RunResult | None
    left_out: str = ""


class OutputRuns:
    """Runs outputs.

    Args:
        prepared: The samples.
        params: The stage's parameters.
        ctx: The stage's context.
        stopwatch: Times them.
        base: Folder of the base model, for outputs that are adapters.
        benchmark: How a round is timed; None if speed is not measured.
        long: Long continuations to compute; None for none.
        drafts: The reference's continuations of the prompts; empty if outputs compute theirs token by token.
        texts: Texts for runtimes that read text themselves.
        settings: Folder with the configuration of the reference; None if there is none.
        memory: What the processes may use.
        ahead: Whether the process of the next output starts while one is computed, as :meth:`take` says. Otherwise only one process works
            at a time.
    """

    def __init__(
        self,
        prepared: Prepared,
        params: ValidateParams,
        ctx: Context,
        *,
        base: Path,
        stopwatch: Stopwatch,
        benchmark: Benchmark | None,
        long: LongSpec | None,
        drafts: tuple[tuple[int, ...], ...],
        texts: Texts,
        settings: Path | None,
        memory: Memory,
        ahead: bool,
    ) -> None:
        self._base = base
        self._texts = texts
        self._settings = settings
        self._prepared = prepared
        self._params = params
        self._ctx = ctx
        self._stopwatch = stopwatch
        self._benchmark = benchmark
        self._long = long
        self._drafts = drafts
        self._memory = memory
        self._ahead = ahead
        self._next: Runner | None = None

    def take(self, outputs: Mapping[str, Path], folder: Path) -> Generator[OutputRun]:
        """Run and time outputs, and yield each.

        The next output's process imports its libraries while one is computed, and waits while that is timed. It loads its model and
        computes while the caller judges the one before.
        """
        planned = [
            self._plan(name, model, folder / name, label=f"output {number} of {len(outputs)}: {name}")
            for number, (name, model) in enumerate(outputs.items(), 1)
        ]
        with ExitStack() as ahead:
            for one, after in zip(planned, (*planned[1:], None), strict=True):
                if one.refusal is not None:
                    yield OutputRun(one.name, one.model, one.spec, one.folder, one.refusal)
                    continue
                yield self._run(one, after, ahead)

    def _plan(self, name: str, model: Path, folder: Path, *, label: str) -> _Planned:
        runtime = runtime_for(name, model)
        spec = self._prepared.spec(
            runtime.load if runtime else "",
            model,
            params=self._params,
            threads=self._ctx.threads,
            compare=self._params.compare_outputs,
            benchmark=self._benchmark,
        )
        settings = None if self._params.evidence.repeats_shapes else self._settings
        known = explain_shape_reuse(runtime, model, settings) if settings else ""
        beside = self._base.absolute() if runtime and runtime.on_base else None
        texts = self._texts.file if runtime and runtime.reads_text else None
        of_reference = {"long": self._long, "cases_known": known, "drafts": self._drafts}
        spec = spec.model_copy(update={**of_reference, "base": beside, "texts": texts})
        refusal = find_refusal(name, model, runtime, self._prepared.family)
        why = self._why_by_layers(model, runtime) if refusal is None else ""
        spec, left_out = leave_out(spec, why) if why else (spec, "")
        return _Planned(name, model, spec, folder, label, refusal, left_out)

    def _why_by_layers(self, model: Path, runtime: Runtime | None) -> str:
        """Return why an output that PyTorch runs is computed layer by layer; empty for others, and if it is computed as a whole."""
        if runtime is None or not (runtime.load == REFERENCE_CODE or runtime.on_base):
            return ""
        return self._memory.why_by_layers(self._base if runtime.on_base else model)

    def _run(self, one: _Planned, after: _Planned | None, ahead: ExitStack) -> OutputRun:
        """Run one output; if memory runs out, run it again without the waiting reference and without the next output's process."""
        if not self._ahead:
            self._stopwatch.make_room()
        done = self._run_once(one, after, ahead)
        started = self._next is not None
        if done.result.reason in OUT_OF_MEMORY and (self._stopwatch.waits or started):
            self._ahead, self._next = False, None
            ahead.close()
            if started and after is not None:
                shutil.rmtree(after.folder)  # it is started anew in its turn
            self._stopwatch.release(NO_ROOM)
            shutil.rmtree(one.folder)
            done = self._run_once(one, None, ahead)
        if self._next is not None:
            self._stopwatch.make_room()
            self._next.begin()
        return done

    def _run_once(self, one: _Planned, after: _Planned | None, ahead: ExitStack) -> OutputRun:
        with ExitStack() as running:
            runner, self._next = self._next, None
            if runner is None:
                runner = running.enter_context(self._start(one))
            else:
                running.push(ahead.pop_all())
            if after is not None and after.refusal is None and self._ahead:
                self._next = ahead.enter_context(self._start(after, held=True))
            result, speed, note = runner.result, None, one.left_out
            if result.status == "done" and one.spec.benchmark is not None:
                if self._next is not None:
                    self._next.wait_for_imports()
                speed, note = self._stopwatch.time(runner)
        return OutputRun(one.name, one.model, one.spec, one.folder, result, speed, note)

    def _start(self, one: _Planned, *, held: bool = False) -> AbstractContextManager[Runner]:
        timeout = self._params.output_timeout_seconds * (LONGER if one.spec.by_layers else 1)
        spec = one.spec.model_copy(update={"held": held})
        return start_runner(Spec(run=spec), one.folder, self._ctx, label=one.label, timeout_seconds=timeout)


def explain_shape_reuse(runtime: Runtime | None, model: Path, settings: Path) -> str:
    """Return why an output can skip the shape cases: it runs the reference's code. Empty if it cannot skip them.

    Args:
        runtime: Runtime of the output.
        model: Folder of the output.
        settings: Folder with the configuration of what the adapter was trained on.
    """
    own, theirs = read_object_or_empty(model / CONFIG), read_object_or_empty(settings / CONFIG)
    packed = own.get("quantization_config") or {}
    if runtime is None or runtime.load != REFERENCE_CODE or not own or _rounds_while_computing(packed):
        return ""
    return SAME_CODE if _code_settings(own) == _code_settings(theirs) else ""


def _rounds_while_computing(packed: Any) -> bool:
    """Return whether activations or the cache are rounded; also true if the settings do not tell."""
    if not packed:
        return False
    groups = packed.get("config_groups", {}) if isinstance(packed, dict) else None
    if not isinstance(groups, dict) or packed.get("kv_cache_scheme") is not None:
        return True
    return any(
        not isinstance(group, dict) or group.get("input_activations") or group.get("output_activations")
        for group in groups.values()
    )


def _code_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what the code does, also those in nested parts of the model."""
    return {
        name: _code_settings(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _ABOUT_WEIGHTS
    }


def add_diagnosis(
    found: OutputValidation,
    runtime: Runtime | None,
    *,
    output: Path,
    model: Path,
    exact: bool,
    ctx: Context,
    folder: Path,
    timeout_seconds: float,
) -> OutputValidation:
    """Prepend the format's diagnosis of the output's weights to a verdict that failed for its results; return others unchanged.

    Args:
        found: The verdict.
        runtime: The format's runtime.
        output: Folder of the output.
        model: Folder of the merged model, or of the base.
        exact: Whether the output's weights are those of ``model``.
        ctx: The stage's context.
        folder: Folder for the process.
        timeout_seconds: How long the format may take.

    Raises:
        StageError: ``CANCELLED``.
    """
    of_results = any(check.name not in texts.CHECKS for check in found.failed_checks)
    if found.status is not OutputStatus.FAILED or not of_results or runtime is None or not runtime.explain:
        return found
    asked = ExplainSpec(function=runtime.explain, output=output.absolute(), model=model.absolute(), exact=exact)
    spec = Spec(explain=asked)
    result = process.run(spec, folder, ctx, label=f"{found.name}, weights", timeout_seconds=timeout_seconds)
    if result.status != "done" or not result.message:
        return found
    return found.model_copy(update={"explanation": f"{result.message}; {found.explanation}"})
