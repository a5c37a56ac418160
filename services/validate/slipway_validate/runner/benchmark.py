"""Time one round of one model in its own process: a pass over a prompt, then decode steps, batch 1.

For an encoder–decoder the prompt is the encoder's input, and the pass ends with the first decoded token.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from slipway.proof.runtime import LanguageModel, Past, Samples, Step, plain_step, source_of
from slipway_validate.protocol.messages import WARM_UP_STEPS, Benchmark, Round


def time_round(model: LanguageModel, samples: Samples, benchmark: Benchmark) -> Round:
    """Time prefill and decode. The first window gives the prompt and the decoded tokens.

    The figures are wall-clock times of whole calls as a caller sees them, including logits. A round ends after
    ``round_seconds``, but not before one prefill and one decode step are timed.
    """
    tokens = [int(token) for token in samples.tokens[0]]
    source = source_of(samples, [0])
    prompt = tokens[: min(benchmark.prefill_tokens, model.bounds.sequence)] if source is None else tokens[:1]
    first = plain_step(prompt, past=None, past_length=0, source=source)
    _warm_up(model, first)
    deadline = time.monotonic() + benchmark.round_seconds
    prefills, past = _time_prefill(model, first, benchmark, deadline)
    steps = _time_decode(model, tokens, first, past, benchmark=benchmark, deadline=deadline) if model.has_cache else ()
    length = len(prompt) if source is None else source.values.shape[-1]
    return Round(prefill_tokens=length, prefill_seconds=prefills, decode_seconds=steps)


def _warm_up(model: LanguageModel, step: Step) -> None:
    """Compute the first token of the prompt, which wakes the threads and reads all weights; an encoder's input stays whole."""
    first = np.s_[:, :1]
    model.forward(
        replace(
            step,
            input_ids=step.input_ids[first],
            attention_mask=step.attention_mask[first],
            position_ids=step.position_ids[first],
        )
    )


def _time_prefill(
    model: LanguageModel, step: Step, benchmark: Benchmark, deadline: float
) -> tuple[tuple[float, ...], Past]:
    """Time at least one pass, and more only within half of the time: the rest is for decoding."""
    times: list[float] = []
    past: Past = None
    until = deadline - benchmark.round_seconds / 2
    while not times or (len(times) < benchmark.prefills and time.monotonic() < until):
        begin = time.perf_counter()
        _, past = model.forward(step)
        times.append(time.perf_counter() - begin)
    return tuple(times), past


def _time_decode(
    model: LanguageModel, tokens: list[int], first: Step, past: Past, *, benchmark: Benchmark, deadline: float
) -> tuple[float, ...]:
    length = first.input_ids.shape[1]
    room = max(0, min(model.bounds.past, benchmark.longest_text) - length)
    times: list[float] = []
    for index in range(min(WARM_UP_STEPS + benchmark.decode_steps, room)):
        step = plain_step([tokens[index % len(tokens)]], past=past, past_length=length + index, source=first.source)
        begin = time.perf_counter()
        _, past = model.forward(step)
        if index >= WARM_UP_STEPS:
            times.append(time.perf_counter() - begin)
            if time.monotonic() > deadline:
                break
    return tuple(times)
