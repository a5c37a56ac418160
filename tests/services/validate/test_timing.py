"""Rounds of timing: medians, scatter, pairs with the reference, what is stable, and what ends early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.proof.runtime import Bounds, Past, Samples, Step
from slipway.stage import Context, Progress
from slipway.validation.speed import Engine, Memory, Speed
from slipway_validate import speed as stopwatch_module
from slipway_validate.params import ValidateParams
from slipway_validate.protocol.messages import WARM_UP_STEPS, Benchmark, Round, RunResult
from slipway_validate.protocol.process import RunnerEnded
from slipway_validate.runner.benchmark import time_round
from slipway_validate.speed import (
    NO_REFERENCE,
    NO_ROOM,
    QUICK,
    REFERENCE_GONE,
    Rounds,
    Stopwatch,
    speed_of,
    take_rounds,
)

DONE = RunResult(
    device="cpu",
    engine=Engine(runtime="onnxruntime", native_dtype="float32"),
    memory=Memory(peak_rss_bytes=1000, baseline_rss_bytes=10),
)


def a_round(prefill: float, decode: float | None = None) -> Round:
    steps = () if decode is None else (decode * 0.9, decode, decode * 5)  # one step that something interrupted
    return Round(prefill_tokens=8, prefill_seconds=(prefill, prefill), decode_seconds=steps)


class Scripted:
    """A runner that gives these rounds, then is gone; tells a common list whose turn it was."""

    def __init__(self, rounds: Iterable[Round], turns: list[str], name: str = "output") -> None:
        self._rounds: Iterator[Round] = iter(rounds)
        self._turns, self._name = turns, name
        self.alive = True
        self.label = name
        self.result = DONE

    def time_round(self) -> Round:
        taken = next(self._rounds, None)
        if taken is None:
            self.alive = False
            raise RunnerEnded("its process was killed")
        self._turns.append(self._name)
        return taken

    def cpu_seconds(self) -> float:
        return 0.0

    def anonymous_bytes(self) -> int:
        return 400

    def end(self) -> None:
        self.alive = False


def both(prefills: list[float], theirs: list[float], turns: list[str] | None = None) -> tuple[Scripted, Scripted]:
    turns = [] if turns is None else turns
    own = Scripted((a_round(each, each / 10) for each in prefills), turns)
    return own, Scripted((a_round(each, each / 10) for each in theirs), turns, "reference")


def summed_up(taken: Rounds) -> Speed:
    speed = speed_of(taken, DONE, threads=2)
    assert speed is not None
    return speed


def test_output_and_reference_are_timed_in_turn() -> None:
    turns: list[str] = []
    output, reference = both([0.01] * 4, [0.02] * 4, turns)
    taken = take_rounds(output, reference, rounds=4, max_seconds=60)
    assert turns == ["output", "reference"] * 4
    assert summed_up(taken).interleaved
    assert taken.note == ""


def test_a_figure_is_the_median_of_the_rounds_with_their_percentiles() -> None:
    output, reference = both([0.010, 0.011, 0.012, 0.013, 0.090], [0.020] * 5)
    speed = summed_up(take_rounds(output, reference, rounds=5, max_seconds=60))
    assert speed.prefill_ms == pytest.approx(12)
    assert speed.prefill_ms_range == pytest.approx((10.4, 59.2))  # numpy's linear percentiles of five values
    assert speed.decode_tokens_per_second == pytest.approx(1 / 0.0012)
    assert (speed.rounds, speed.repeats, speed.decode_steps) == (5, 10, 15)
    assert speed.decode_ms_median is not None
    assert not speed.prefill_stable
    assert not speed.stable


def test_what_slows_both_leaves_the_ratio_alone() -> None:
    machine = [1.0, 1.1, 7.0, 6.0, 1.2, 3.0]  # a neighbour comes and goes
    output, reference = both([0.010 * slow for slow in machine], [0.025 * slow for slow in machine])
    speed = summed_up(take_rounds(output, reference, rounds=6, max_seconds=60))
    assert not speed.prefill_stable
    for ratio in (speed.prefill_speedup, speed.decode_speedup):
        assert ratio is not None
        assert ratio.median == pytest.approx(2.5)
        assert ratio.range == pytest.approx((2.5, 2.5))
        assert ratio.stable


@pytest.mark.parametrize(
    ("prefills", "stable"),
    [
        ([0.0100, 0.0101, 0.0102], True),
        ([0.010, 0.011, 0.012, 0.0105, 0.0115], True),  # 15 % from the 10th to the 90th percentile
        ([0.010, 0.0125, 0.014, 0.009], False),
        ([0.01, 0.01], False),  # two rounds agree by chance
        ([0.01], False),
    ],
)
def test_stable_takes_three_rounds_within_a_fifth(prefills: list[float], stable: bool) -> None:
    output, reference = both(prefills, prefills)
    speed = summed_up(take_rounds(output, reference, rounds=len(prefills), max_seconds=60))
    assert speed.prefill_stable is stable
    assert speed.decode_stable is stable


def test_time_is_bounded_but_one_round_is_taken() -> None:
    clock = iter([0.0, 5.0, 11.0, 99.0])
    output, reference = both([0.01] * 9, [0.01] * 9)
    taken = take_rounds(output, reference, rounds=9, max_seconds=10, clock=lambda: next(clock))
    assert len(taken.own) == len(taken.reference) == 2
    assert taken.note == "2 of 9 rounds fitted into 10 s"
    slow = iter([0.0, 1000.0])
    output, reference = both([30.0] * 9, [60.0] * 9)
    speed = summed_up(take_rounds(output, reference, rounds=9, max_seconds=10, clock=lambda: next(slow)))
    assert (speed.rounds, speed.prefill_ms, speed.prefill_ms_range) == (1, 30_000, None)
    assert not speed.stable
    assert speed.prefill_speedup is not None
    assert speed.prefill_speedup.range is None
    assert not speed.prefill_speedup.stable


def test_rounds_that_agree_suffice() -> None:
    steady, theirs = both([0.01] * 9, [0.02] * 9)
    taken = take_rounds(steady, theirs, rounds=9, max_seconds=60, enough=4)
    assert (len(taken.own), len(taken.reference), taken.note) == (4, 4, "")
    output, reference = both([0.01, 0.03, 0.01, 0.03, 0.02, 0.04], [0.02] * 6)
    taken = take_rounds(output, reference, rounds=6, max_seconds=60, enough=4)
    assert len(taken.own) == 6, "they scatter"
    everything, _ = both([0.01] * 9, [])
    assert len(take_rounds(everything, None, rounds=9, max_seconds=60).own) == 9


def test_a_runner_that_dies_keeps_the_rounds_it_gave() -> None:
    output, reference = both([0.01, 0.01], [0.01] * 9)
    taken = take_rounds(output, reference, rounds=7, max_seconds=60)
    assert summed_up(taken).rounds == 2
    assert taken.note == "timing ended after 2 of 7 rounds: its process was killed"
    output, reference = both([], [0.01] * 9)
    assert speed_of(take_rounds(output, reference, rounds=7, max_seconds=60), DONE, threads=1) is None


def test_a_reference_that_dies_lets_the_output_be_timed_on() -> None:
    output, reference = both([0.01] * 4, [0.01])
    speed = summed_up(take_rounds(output, reference, rounds=4, max_seconds=60))
    assert speed.rounds == 4
    assert not speed.interleaved
    assert speed.prefill_speedup is not None
    assert "reference" in speed.note


def stopwatch(reference: Scripted | None, context: Context, **params: Any) -> Stopwatch:
    return Stopwatch(reference, ValidateParams(benchmark_repeats=3, **params), context)  # type: ignore[arg-type]


def test_the_reference_has_the_rounds_of_all_outputs(context: Context) -> None:
    _, reference = both([], [0.01] * 6)
    watch = stopwatch(reference, context)
    for prefill in (0.02, 0.005):
        output, _ = both([prefill] * 3, [])
        speed, note = watch.time(output)  # type: ignore[arg-type]
        assert speed is not None
        assert speed.interleaved
        assert speed.note == note == ""
    own = watch.reference_speed()
    assert own is not None
    assert own.rounds == 6
    assert own.prefill_ms == pytest.approx(10)


@pytest.mark.parametrize(("available", "limit"), [(999, 1 << 40), (1 << 40, 1399)])
def test_a_reference_that_would_crowd_out_an_output_ends_after_it_was_timed_alone(
    context: Context, monkeypatch: pytest.MonkeyPatch, available: int, limit: int
) -> None:
    # Of this machine's memory, which is what it is, only the figure is replaced.
    monkeypatch.setattr(stopwatch_module, "available_memory", lambda _: available)
    context.max_memory_bytes = limit
    _, reference = both([], [0.01] * 3)
    watch = stopwatch(reference, context)
    watch.make_room()
    assert not watch.waits
    output, _ = both([0.02] * 3, [])
    speed, _ = watch.time(output)  # type: ignore[arg-type]
    assert speed is not None
    assert not speed.interleaved
    assert speed.prefill_speedup is None
    assert speed.note == NO_ROOM
    own = watch.reference_speed()
    assert own is not None
    assert own.rounds == 3


def test_room_is_made_for_a_model_in_float32_even_if_the_reference_is_mapped(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopwatch_module, "available_memory", lambda _: 1 << 40)  # as above
    context.max_memory_bytes = 5000
    watch = Stopwatch(both([], [0.01] * 9)[1], ValidateParams(), context, model_bytes=4000)  # type: ignore[arg-type]
    watch.make_room()
    assert watch.waits, "400 of the reference, 10 of the libraries, and the model"
    context.max_memory_bytes = 4400
    watch.make_room()
    assert not watch.waits


def test_a_reference_that_fits_stays(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch_module, "available_memory", lambda _: 1000)  # as above
    context.max_memory_bytes = 1400
    watch = stopwatch(both([], [0.01] * 3)[1], context)
    watch.make_room()
    assert watch.waits


def test_why_there_was_no_reference_is_said(context: Context) -> None:
    output, _ = both([0.02] * 3, [])
    speed, _ = stopwatch(None, context).time(output)  # type: ignore[arg-type]
    assert speed is not None
    assert speed.note == NO_REFERENCE
    output, _ = both([0.02] * 3, [])
    quick = Stopwatch(None, ValidateParams(effort="quick"), context, why=QUICK)
    speed, _ = quick.time(output)  # type: ignore[arg-type]
    assert speed is not None
    assert speed.note == QUICK
    gone = both([], [])[1]
    gone.end()
    output, _ = both([0.02] * 3, [])
    speed, _ = stopwatch(gone, context).time(output)  # type: ignore[arg-type]
    assert speed is not None
    assert speed.note == REFERENCE_GONE


def test_each_round_is_told_as_progress(tmp_path: Path) -> None:
    seen: list[Progress] = []
    output, reference = both([0.01] * 3, [0.02] * 3)
    stopwatch(reference, Context(workdir=tmp_path, on_progress=seen.append)).time(output)  # type: ignore[arg-type]
    assert [(each.phase, each.done, each.total) for each in seen] == [("output, timing", n, 3) for n in (1, 2, 3)]


class Counting:
    """A decoder that counts its calls and takes no time."""

    device, native_dtype, architecture, has_cache, bounds = "cpu", "float32", "", True, Bounds()
    engine = DONE.engine

    def __init__(self) -> None:
        self.calls: list[int] = []

    def forward(self, step: Step) -> tuple[np.ndarray[Any, Any], Past]:
        self.calls.append(step.input_ids.shape[1])
        return np.zeros((1, step.input_ids.shape[1], 4), np.float32), len(self.calls)


def test_a_round_warms_up_first() -> None:
    model, samples = Counting(), Samples(np.arange(40)[None])
    taken = time_round(model, samples, Benchmark(prefill_tokens=16, prefills=2, decode_steps=5))  # type: ignore[arg-type]
    assert model.calls == [1] + [16] * 2 + [1] * (WARM_UP_STEPS + 5)
    assert (taken.prefill_tokens, len(taken.prefill_seconds), len(taken.decode_seconds)) == (16, 2, 5)


def test_a_round_ends_with_the_longest_text_of_the_model() -> None:
    model, samples = Counting(), Samples(np.arange(40)[None])
    short = Benchmark(prefill_tokens=16, longest_text=16 + WARM_UP_STEPS + 3, prefills=1, decode_steps=5)
    taken = time_round(model, samples, short)  # type: ignore[arg-type]
    assert sum(model.calls[1:]) == short.longest_text
    assert len(taken.decode_seconds) == 3


def test_a_round_without_time_is_one_prefill_and_one_step() -> None:
    model, samples = Counting(), Samples(np.arange(40)[None])
    none = Benchmark(prefill_tokens=16, prefills=2, decode_steps=5, round_seconds=0)
    taken = time_round(model, samples, none)  # type: ignore[arg-type]
    assert model.calls == [1, 16] + [1] * (WARM_UP_STEPS + 1)
    assert (len(taken.prefill_seconds), len(taken.decode_seconds)) == (1, 1)


def test_a_single_figure_of_an_older_report_is_read_and_is_not_stable() -> None:
    old = {
        "threads": 1,
        "device": "cpu",
        "dtype": "float32",
        "prefill_tokens": 128,
        "prefill_ms": 5.0,
        "decode_tokens_per_second": 165.0,
        "decode_ms_median": 6.0,
        "decode_ms_p95": 7.0,
        "repeats": 5,
        "decode_steps": 32,
    }
    speed = Speed.model_validate(old)
    assert (speed.prefill_ms, speed.decode_tokens_per_second, speed.rounds) == (5.0, 165.0, 1)
    assert not speed.prefill_stable
    assert not speed.decode_stable
    assert Speed.model_validate_json(speed.model_dump_json()) == speed
