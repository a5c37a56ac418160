"""Time the outputs that ``bench_formats.py`` compares, ours and a peer's by the same lines, in turn.

This file as a command with RUNTIME FILE TOKENIZER THREADS loads one output, and runs a round for each line that it gets. With one thread, processor
time is measured, which a busy machine distorts least; with several, wall time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import alternating

PROMPT, NEW = 128, 48
"""Tokens of the prompt, and tokens that follow it."""
ROUNDS = 8
"""Rounds of each output, of which the best counts as its speed: others on the machine make the rest slower."""
TEXT = "The statement is the class of the object. " * 40
Speed = dict[str, float]
Round = Callable[[], Speed]


def alternate(runtime: str, files: Mapping[str, Path], tokenizer: Path, *, threads: int) -> dict[str, list[Speed]]:
    """Run rounds of outputs in turn; return those of each by its name, without outputs that cannot be run."""
    words = [tokenizer, str(threads)]
    commands = {name: [sys.executable, __file__, runtime, file, *words] for name, file in files.items()}
    return alternating.alternate(commands, rounds=ROUNDS)


def best(rounds: list[Speed]) -> Speed:
    """Return the best figures of several rounds."""
    return {
        figure: (min if figure.endswith("seconds") else max)(each[figure] for each in rounds if figure in each)
        for figure in {figure: None for each in rounds for figure in each}
    }


def _text(tokenizer: Path) -> str:
    """Return a text of the prompt's length."""
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(str(tokenizer))
    return str(read.decode(read.encode(TEXT, add_special_tokens=False).ids[:PROMPT]))


def _clock(threads: int) -> Callable[[], float]:
    return time.process_time if threads == 1 else time.perf_counter


def _of_lengths(generate: Callable[[int], object], clock: Callable[[], float]) -> Round:
    """Return a round of a function that generates a number of tokens after the prompt: one, and then some."""

    def seconds(tokens: int) -> float:
        begin = clock()
        generate(tokens)
        return clock() - begin

    def once() -> Speed:
        first, all_of_them = seconds(1), seconds(NEW)
        return {"prefill_seconds": first, "decode_tokens_per_second": (NEW - 1) / (all_of_them - first)}

    return once


def _llama_cpp(file: Path, tokenizer: Path, threads: int) -> Round:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.verbosity = str(file), 512, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    asked = {"prompt": _text(tokenizer), "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    server = xllamacpp.Server(params)
    return _of_lengths(lambda tokens: server.handle_completions(asked | {"n_predict": tokens}), _clock(threads))


def _openvino(file: Path, tokenizer: Path, threads: int) -> Round:
    import openvino_genai

    config = openvino_genai.SchedulerConfig()  # by default the prompt of the round before would be known
    options = {"scheduler_config": config, "INFERENCE_NUM_THREADS": threads}
    pipeline, text = openvino_genai.LLMPipeline(str(file.parent), "CPU", **options), _text(tokenizer)

    def generate(tokens: int) -> None:
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, apply_chat_template=False)
        pipeline.generate([text], config)

    return _of_lengths(generate, _clock(threads))


def _executorch(file: Path, tokenizer: Path, threads: int) -> Round:
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    clock = _clock(threads)  # the runner takes the threads that it wants, and no caller can say how many
    runner, text = TextLLMRunner(str(file), str(tokenizer)), _text(tokenizer)
    config = GenerationConfig(max_new_tokens=NEW, temperature=0.0, echo=False)

    def once() -> Speed:
        runner.reset()
        times = [clock()]
        runner.generate(text, config, lambda _: times.append(clock()))
        found = {"prefill_seconds": times[1] - times[0]}
        if len(times) > NEW // 2:  # this runner stops at the end of a text, and a few tokens give no speed
            found["decode_tokens_per_second"] = (len(times) - 2) / (times[-1] - times[1])
        return found

    return once


def _litert(file: Path, _: Path, threads: int) -> Round:
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    clock, interpreter = _clock(threads), Interpreter(model_path=str(file), num_threads=threads)
    names = {name.partition("_")[0]: name for name in interpreter.get_signature_list()}
    calls = {kind: interpreter.get_signature_runner(names[kind]) for kind in ("prefill", "decode")}

    def given(kind: str, cache: dict[str, Any], place: int) -> dict[str, Any]:
        inputs = {name: (each["shape"], each["dtype"]) for name, each in calls[kind].get_input_details().items()}
        filled = {name: np.zeros(shape, dtype) for name, (shape, dtype) in inputs.items()}
        tokens = filled["tokens"].shape[1]
        filled["tokens"] += np.arange(3, 3 + tokens, dtype=filled["tokens"].dtype)
        filled["input_pos"] = np.arange(place, place + tokens, dtype=filled["input_pos"].dtype)
        return filled | {name: value for name, value in cache.items() if name in filled}

    def once() -> Speed:
        times = [clock()]
        cache = calls["prefill"](**given("prefill", {}, 0))
        times.append(clock())
        for place in range(PROMPT, PROMPT + NEW):
            cache = calls["decode"](**given("decode", cache, place))
            times.append(clock())
        return {"prefill_seconds": times[1] - times[0], "decode_tokens_per_second": NEW / (times[-1] - times[1])}

    return once


def _torch(load: Callable[[Path], Callable[..., object]], file: Path, threads: int) -> Round:
    import torch

    torch.set_num_threads(threads)
    clock = _clock(threads)
    described = file.with_name({"model.pt": "torchscript.json", "model.pt2": "torch_export.json"}[file.name])
    ids = torch.arange(3, 3 + PROMPT)[None]
    given: tuple[object, ...] = (ids,)
    if described.is_file():
        cache = [torch.zeros(1, heads, 0, width) for heads, width in json.loads(described.read_text())["cache"]]
        given = (ids, torch.ones_like(ids), torch.arange(PROMPT)[None], cache)
    call = load(file)

    def once() -> Speed:
        begin = clock()
        with torch.no_grad():
            call(*given)
        return {"prefill_seconds": clock() - begin}

    once()  # the first two calls compile
    return once


def _torchscript(file: Path, _: Path, threads: int) -> Round:
    import torch

    return _torch(lambda path: torch.jit.load(str(path)), file, threads)


def _torch_export(file: Path, _: Path, threads: int) -> Round:
    import torch

    return _torch(lambda path: torch.export.load(str(path)).module(), file, threads)


RUNTIMES: dict[str, Callable[[Path, Path, int], Round]] = {
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
    "executorch": _executorch,
    "litert": _litert,
    "torchscript": _torchscript,
    "torch_export": _torch_export,
}


if __name__ == "__main__":
    runtime, file, tokenizer, threads = sys.argv[1:]
    alternating.answer(lambda: RUNTIMES[runtime](Path(file), Path(tokenizer), int(threads)))
