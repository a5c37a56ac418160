"""Speed of one model: batch 1, a warm-up first, medians of what follows."""

from __future__ import annotations

import time

import numpy as np

from slipway.validation import Speed
from slipway_validate.model import LanguageModel, Past, plain_step
from slipway_validate.numerics import Ints
from slipway_validate.protocol import Benchmark

WARM_UP_STEPS = 2


def measure(model: LanguageModel, tokens: Ints, benchmark: Benchmark, *, threads: int) -> Speed:
    """Time prefill and decode. tokens: (N, T), whose first window gives prompt and decoded tokens.

    Wall-clock time of whole calls as a caller sees them, logits included. The machine's clock and neighbours scatter it:
    compare figures of one report only.
    """
    prompt = [int(token) for token in tokens[0, : min(benchmark.prefill_tokens, model.bounds.sequence)]]
    prefills, past = _time_prefill(model, prompt, benchmark)
    steps = _time_decode(model, prompt, past, benchmark) if model.has_cache else []
    median = float(np.median(steps)) if steps else None
    return Speed(
        threads=threads,
        device=model.device,
        dtype=model.native_dtype,
        prefill_tokens=len(prompt),
        prefill_ms=float(np.median(prefills)) * 1000,
        decode_tokens_per_second=1 / median if median else None,
        decode_ms_median=median * 1000 if median else None,
        decode_ms_p95=float(np.percentile(steps, 95)) * 1000 if steps else None,
        repeats=len(prefills),
        decode_steps=len(steps),
    )


def _time_prefill(model: LanguageModel, prompt: list[int], benchmark: Benchmark) -> tuple[list[float], Past]:
    step = plain_step(prompt, past=None, past_length=0)
    deadline = time.monotonic() + benchmark.max_seconds
    _, past = model.forward(step)
    times: list[float] = []
    while not times or (len(times) < benchmark.repeats and time.monotonic() < deadline):
        begin = time.perf_counter()
        _, past = model.forward(step)
        times.append(time.perf_counter() - begin)
    return times, past


def _time_decode(model: LanguageModel, prompt: list[int], past: Past, benchmark: Benchmark) -> list[float]:
    deadline = time.monotonic() + benchmark.max_seconds
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
    return times
