"""Time a validation's outputs in rounds beside the reference, and find quantized ones that are slower than unquantized.

A machine's speed changes from second to second with its clock, other processes and caches. So every figure is a median over
several rounds, reported with their range, and an output is compared with the reference round by round, because both slow down
together. The reference's process waits as long as memory allows.

The original of a quantized output is the unquantized one of its format. A note says what helps. The machine is described too.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import psutil

from slipway.machine.cgroup import ControlGroup, available_memory, machine_memory, usable_cores
from slipway.machine.processors import processor_name
from slipway.stage import Context
from slipway.validation.findings import OutputValidation, ValidationReport
from slipway.validation.speed import Machine, Ratio, Speed
from slipway_validate.params import ValidateParams
from slipway_validate.protocol.messages import Round, RunResult
from slipway_validate.protocol.process import Runner, RunnerEnded

NO_REFERENCE = "timed alone: compare_outputs is off, so no reference was run"
NO_ROOM = "timed alone: this output and the reference do not fit into memory together"
QUICK = "timed alone: effort quick starts no reference for it"
REFERENCE_GONE = "timed alone: the reference's process has ended"

LOW, HIGH = 10, 90
"""Percentiles of the rounds that bound the range of a figure."""

_LEAST_SPEED = 0.9
"""Share of the original's speed below which a quantized output is slower: rounds of the same model differ by less."""
_REMEDIES = {
    "pytorch": "transformers unpacks integers before it multiplies: serve this folder with a runtime that multiplies them (vLLM), or use the "
    "ONNX level on CPUs",
    "onnx": "this processor has no fast kernel for these weights: use another level, or accuracy_level 4, and compare on the machine that serves",
}
_OTHER_REMEDY = "use another level, and compare on the machine that serves"


class Stopwatch:
    """Times one output after the other; nothing else computes during a round.

    Args:
        reference: The reference's process; None if outputs are not compared.
        params: The stage's parameters.
        ctx: The stage's context.
        model_bytes: Size of the model in float32, the largest that an output computes in.
        why: Why there is no reference to time beside.
    """

    def __init__(
        self,
        reference: Runner | None,
        params: ValidateParams,
        ctx: Context,
        *,
        model_bytes: int = 0,
        why: str = NO_REFERENCE,
    ) -> None:
        self._reference = reference
        self._params = params
        self._ctx = ctx
        self._model_bytes = model_bytes
        self._alone = "" if reference else why
        self._of_reference: list[Rounds] = []

    @cached_property
    def _result(self) -> RunResult:
        """Return the result of the reference; the first call waits for it."""
        if self._reference is None:
            return RunResult()
        result = self._reference.result
        if result.status != "done":
            self._ctx.warn(f"outputs are timed without the reference, which could not be started: {result.message}")
        return result

    @property
    def waits(self) -> bool:
        """Return whether the reference's process is still alive."""
        return self._reference is not None and self._reference.alive

    def make_room(self) -> None:
        """End the reference's process if the next output might not fit beside it."""
        memory = self._result.memory if self._reference is not None else None
        if self._reference is None or memory is None or not self.waits:
            return
        # No output needs more: it is the same model, and float32 is the widest type. The reference's own weights may be mapped.
        needed = max(memory.peak_rss_bytes, memory.baseline_rss_bytes + self._model_bytes)
        together = self._reference.anonymous_bytes() + needed
        if needed > available_memory(ControlGroup().memory()) or together > self._ctx.max_memory_bytes:
            self.release(NO_ROOM)

    def release(self, why: str) -> None:
        """End the reference's process, after timing it alone if need be; later outputs report ``why`` they are timed alone."""
        if self._reference is None or not self.waits:
            return
        self._time_reference()
        self._reference.end()
        self._alone = why

    def time(self, output: Runner) -> tuple[Speed | None, str]:
        """Time a waiting output; return its speed, or None and the reason if not even one round finished."""
        _ = self._result  # wait until the reference has computed its own results
        if self._reference is not None and not self.waits and not self._alone:
            self._alone = REFERENCE_GONE
        reference = self._reference if self.waits else None
        taken = self._rounds(output, reference)
        if taken.reference:
            self._of_reference.append(Rounds(own=taken.reference, other_cores=taken.other_cores))
        speed = speed_of(taken, output.result, threads=self._ctx.threads)
        if speed is None:
            return None, f"its speed is unknown: {taken.note}"
        note = "; ".join(filter(None, (speed.note, "" if speed.interleaved else self._alone)))
        return speed.model_copy(update={"note": note}), ""

    def reference_speed(self) -> Speed | None:
        """Return the reference's speed over all its rounds."""
        if not self._params.benchmark_performance:
            return None
        self._time_reference()
        others = [each.other_cores for each in self._of_reference if each.other_cores is not None]
        together = Rounds(
            own=[taken for each in self._of_reference for taken in each.own],
            other_cores=sum(others) / len(others) if others else None,
        )
        return speed_of(together, self._result, threads=self._ctx.threads)

    def _time_reference(self) -> None:
        """Time the reference alone if no output was timed beside it."""
        if self._reference is not None and self.waits and not self._of_reference:
            self._of_reference.append(self._rounds(self._reference, None))

    def _rounds(self, output: Runner, reference: Runner | None) -> Rounds:
        params = self._params
        rounds = min(params.benchmark_repeats, params.evidence.most_rounds)

        def report(taken: int) -> None:
            self._ctx.progress(f"{output.label}, timing", done=taken, total=rounds, unit="rounds")

        return take_rounds(
            output,
            reference,
            rounds=rounds,
            max_seconds=params.benchmark_seconds,
            enough=params.evidence.rounds,
            on_round=report,
        )


class Timed(Protocol):
    """A waiting runner that can be timed."""

    def time_round(self) -> Round:
        """Time one round."""
        ...

    def cpu_seconds(self) -> float:
        """Return the processor time used so far."""
        ...


@dataclass
class Rounds:
    """The rounds of one model, with those of the reference.

    Attributes:
        own: The model's rounds.
        reference: The reference's rounds, one after each of the model's; empty if it was timed alone.
        note: Why there are fewer rounds than requested, or none.
        other_cores: Cores that other processes kept busy meanwhile; None if unknown.
    """

    own: list[Round] = field(default_factory=list)
    reference: list[Round] = field(default_factory=list)
    note: str = ""
    other_cores: float | None = None


def take_rounds(
    output: Timed,
    reference: Timed | None,
    *,
    rounds: int,
    max_seconds: float,
    enough: int = 0,
    on_round: Callable[[int], None] = lambda taken: None,  # noqa: ARG005 - does nothing by default
    clock: Callable[[], float] = time.monotonic,
) -> Rounds:
    """Time an output and the reference alternately, or one of them alone.

    Args:
        output: The model that is timed first.
        reference: The model that is timed second; None times the output alone.
        rounds: Rounds of each.
        max_seconds: No round starts after so many seconds; one of each is always run.
        enough: Rounds that suffice if their figures are stable; 0 takes all.
        on_round: Called with the number of rounds so far.
        clock: Returns the time in seconds.

    Raises:
        StageError: ``CANCELLED``.
    """
    taken = Rounds()
    begin, others = clock(), _OtherProcesses(*filter(None, (output, reference)))
    try:
        while len(taken.own) < rounds and (not taken.own or clock() - begin < max_seconds):
            taken.own.append(output.time_round())
            reference = _time_reference_round(reference, taken)
            on_round(len(taken.own))
            if enough and len(taken.own) >= enough and _is_settled(taken):
                break
    except RunnerEnded as ended:
        taken.note = f"timing ended after {len(taken.own)} of {rounds} rounds: {ended}"
    else:
        if len(taken.own) < rounds and not taken.note and not (enough and _is_settled(taken)):
            taken.note = f"{len(taken.own)} of {rounds} rounds fitted into {max_seconds:g} s"
    taken.other_cores = others.cores()
    return taken


def _is_settled(taken: Rounds) -> bool:
    """Return whether more rounds would hardly change the figures: they are stable, and so are their ratios to the reference's."""
    speed = speed_of(taken, RunResult(), threads=1)
    ratios = () if speed is None else (speed.prefill_speedup, speed.decode_speedup)
    return speed is not None and speed.stable and all(ratio is None or ratio.stable for ratio in ratios)


def _time_reference_round(reference: Timed | None, taken: Rounds) -> Timed | None:
    """Time a round of the reference; return it, or None if its process has ended: the output is then timed alone."""
    if reference is None:
        return None
    try:
        taken.reference.append(reference.time_round())
    except RunnerEnded as ended:
        taken.note = f"the reference was timed in only {len(taken.reference)} rounds: {ended}"
        return None
    return reference


def speed_of(taken: Rounds, result: RunResult, *, threads: int) -> Speed | None:
    """Summarise rounds; None if there are none."""
    if not taken.own:
        return None
    prefills = [float(np.median(each.prefill_seconds)) * 1000 for each in taken.own]
    steps = [1 / float(np.median(each.decode_seconds)) for each in taken.own if each.decode_seconds]
    all_steps = [seconds * 1000 for each in taken.own for seconds in each.decode_seconds]
    pairs = list(zip(taken.own, taken.reference, strict=False))
    return Speed(
        threads=threads,
        device=result.device,
        dtype=result.engine.native_dtype if result.engine else "",
        rounds=len(taken.own),
        interleaved=len(taken.reference) == len(taken.own),
        prefill_tokens=taken.own[0].prefill_tokens,
        prefill_ms=float(np.median(prefills)),
        prefill_ms_range=_range(prefills),
        prefill_speedup=_ratio([_quotient(ours.prefill_seconds, theirs.prefill_seconds) for ours, theirs in pairs]),
        decode_tokens_per_second=float(np.median(steps)) if steps else None,
        decode_range=_range(steps),
        decode_speedup=_ratio(
            [
                _quotient(ours.decode_seconds, theirs.decode_seconds)
                for ours, theirs in pairs
                if ours.decode_seconds and theirs.decode_seconds
            ]
        ),
        decode_ms_median=float(np.median(all_steps)) if all_steps else None,
        decode_ms_p95=float(np.percentile(all_steps, 95)) if all_steps else None,
        repeats=sum(len(each.prefill_seconds) for each in taken.own),
        decode_steps=len(all_steps),
        other_cores=taken.other_cores,
        note=taken.note,
    )


def _quotient(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return how many times faster ``ours`` are than ``theirs``, by their medians."""
    return float(np.median(theirs) / np.median(ours))


def _ratio(quotients: Sequence[float]) -> Ratio | None:
    if not quotients:
        return None
    return Ratio(median=float(np.median(quotients)), range=_range(quotients), rounds=len(quotients))


def _range(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the range of most rounds; None for a single round."""
    if len(values) < 2:
        return None
    low, high = np.percentile(values, [LOW, HIGH])
    return float(low), float(high)


class _OtherProcesses:
    """Measures how many cores other processes than ours keep busy, from now on."""

    def __init__(self, *ours: Timed) -> None:
        self._ours = ours
        self._begin, self._busy, self._own = time.monotonic(), self._machine(), self._used()

    def cores(self) -> float:
        """Return the mean number of cores since the start."""
        seconds = max(time.monotonic() - self._begin, 1e-3)
        return max(0.0, (self._machine() - self._busy - (self._used() - self._own)) / seconds)

    def _used(self) -> float:
        return sum(each.cpu_seconds() for each in self._ours)

    @staticmethod
    def _machine() -> float:
        """Return the seconds that all cores were busy or taken by another machine on the same hardware."""
        times = psutil.cpu_times()
        waiting = times.idle + getattr(times, "iowait", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # included in user time
        return float(sum(times) - waiting - guests)


def note_slower(report: ValidationReport, ctx: Context) -> ValidationReport:
    """Return the report with a note at each quantized output that is slower than its original; warn of it too.

    Both were timed in turn with the reference, so their speeds relative to it are compared, as far as both are stable.
    """
    originals = {output.format: output for output in report.outputs if output.level == "none"}
    outputs = []
    for output in report.outputs:
        original = originals.get(output.format)
        said = _slowness(output, original) if original is not None and output.level != "none" else ""
        if said and said not in output.notes:
            ctx.warn(f"{output.name}: {said}")
            output = output.model_copy(update={"notes": (*output.notes, said)})  # noqa: PLW2901 - the same output, noted
        outputs.append(output)
    return report.model_copy(update={"outputs": tuple(outputs)})


def _slowness(output: OutputValidation, original: OutputValidation) -> str:
    if output.speed is None or original.speed is None:
        return ""
    shares = {
        "generates": _share(output.speed.decode_speedup, original.speed.decode_speedup),
        "reads a prompt": _share(output.speed.prefill_speedup, original.speed.prefill_speedup),
    }
    slow = [
        f"{does} at {share:.2g} times" for does, share in shares.items() if share is not None and share < _LEAST_SPEED
    ]
    if not slow:
        return ""
    return f"it {' and '.join(slow)} the speed of {original.name}: {_REMEDIES.get(output.format, _OTHER_REMEDY)}"


def _share(own: Ratio | None, original: Ratio | None) -> float | None:
    known = own is not None and original is not None and own.stable and original.stable and original.median > 0
    return own.median / original.median if known and own is not None and original is not None else None


def this_machine() -> Machine:
    """Return what this process may use of the machine."""
    group = ControlGroup()
    limited, memory = group.memory(), machine_memory().total_bytes
    return Machine(
        processor=processor_name() or "unknown CPU",
        cores=usable_cores(group),
        memory_bytes=memory if limited is None else min(memory, limited.limit_bytes),
        platform=f"{platform.system()} {platform.machine()}",
    )
