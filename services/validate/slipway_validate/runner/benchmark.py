"""One round of timing of one model, in its own process: a pass over a prompt, then decode steps, batch 1."""

from __future__ import annotations

import time

from slipway_validate.numerics import Ints
from slipway_validate.protocol.messages import Benchmark, Round
from slipway_validate.runner.model import LanguageModel, Past, plain_step

WARM_UP_STEPS = 2
"""Decode steps that are not timed: what ran before, perhaps another process, has taken the caches."""


def time_round(model: LanguageModel, tokens: Ints, benchmark: Benchmark) -> Round:
    """Time prefill and decode. tokens: (N, T), whose first window gives prompt and decoded tokens.

    Wall-clock time of whole calls as a caller sees them, logits included. A round is over after ``round_seconds``, but not before
    one prefill and one decode step are timed.
    """
    prompt = [int(token) for token in tokens[0, : min(benchmark.prefill_tokens, model.bounds.sequence)]]
    deadline = time.monotonic() + benchmark.round_seconds
    prefills, past = _time_prefill(model, prompt, benchmark, deadline)
    steps = _time_decode(model, prompt, past, benchmark=benchmark, deadline=deadline) if model.has_cache else ()
    return Round(prefill_tokens=len(prompt), prefill_seconds=prefills, decode_seconds=steps)


def _time_prefill(
    model: LanguageModel, prompt: list[int], benchmark: Benchmark, deadline: float
) -> tuple[tuple[float, ...], Past]:
    """Drop the first of several, which is slower; where there is time for one only, it has to do."""
    step = plain_step(prompt, past=None, past_length=0)
    times: list[float] = []
    past: Past = None
    # Half of the time at most, so that some is left for decoding.
    until = deadline - benchmark.round_seconds / 2
    while not times or (len(times) < 1 + benchmark.prefills and time.monotonic() < until):
        begin = time.perf_counter()
        _, past = model.forward(step)
        times.append(time.perf_counter() - begin)
    return tuple(times[1:] or times), past


def _time_decode(
    model: LanguageModel, prompt: list[int], past: Past, *, benchmark: Benchmark, deadline: float
) -> tuple[float, ...]:
    room = max(0, model.bounds.past - len(prompt))
    times: list[float] = []
    for index in range(min(WARM_UP_STEPS + benchmark.decode_steps, room)):
        token = prompt[index % len(prompt)]
        begin = time.perf_counter()
        _, past = model.forward(plain_step([token], past=past, past_length=len(prompt) + index))
        if index >= WARM_UP_STEPS:
            times.append(time.perf_counter() - begin)
            if time.monotonic() > deadline:
                break
    return tuple(times)
