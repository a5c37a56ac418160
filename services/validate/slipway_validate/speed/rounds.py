"""Time an output and the reference alternately in rounds, and summarise the rounds.

A machine's speed changes from second to second with its clock, other processes and caches. So every figure is a median over
several rounds, reported with their range, and an output is compared with the reference round by round, because both slow down
together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import psutil

from slipway.validation.speed import Ratio, Speed
from slipway_validate.protocol.messages import Round, RunResult
from slipway_validate.protocol.process import RunnerEnded

LOW, HIGH = 10, 90
"""Percentiles of the rounds that bound the range of a figure."""


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
            if enough and len(taken.own) >= enough and _settled(taken):
                break
    except RunnerEnded as ended:
        taken.note = f"timing ended after {len(taken.own)} of {rounds} rounds: {ended}"
    else:
        if len(taken.own) < rounds and not taken.note and not (enough and _settled(taken)):
            taken.note = f"{len(taken.own)} of {rounds} rounds fitted into {max_seconds:g} s"
    taken.other_cores = others.cores()
    return taken


def _settled(taken: Rounds) -> bool:
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
