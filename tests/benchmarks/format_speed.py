"""Time the outputs that ``bench_formats.py`` compares, ours and a peer's by the same lines: this file as a command with RUNTIME FILE TOKENIZER."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipway.machine.cgroup import usable_cores

PROMPT, NEW = 128, 48
"""Tokens of the prompt, and tokens that follow it."""
REPEATS = 6
"""Repetitions in one process, of which the best counts: others on the machine make the rest slower."""
TEXT = "The statement is the class of the object. " * 40
Speed = dict[str, float]


def _best(once: Callable[[], Speed]) -> Speed:
    """Return the best figures of several repetitions."""
    taken = [once() for _ in range(REPEATS)]
    return {
        figure: (min if figure.endswith("seconds") else max)(each[figure] for each in taken if figure in each)
        for figure in taken[0]
    }


def _text(tokenizer: Path) -> str:
    """Return a text of the prompt's length."""
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(str(tokenizer))
    return str(read.decode(read.encode(TEXT, add_special_tokens=False).ids[:PROMPT]))


def _llama_cpp(file: Path, tokenizer: Path) -> Speed:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.verbosity = str(file), 512, 0
    asked = {"prompt": _text(tokenizer), "n_predict": NEW, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    server = xllamacpp.Server(params)

    def once() -> Speed:
        said = server.handle_completions(asked)["timings"]
        return {"prefill_seconds": said["prompt_ms"] / 1e3, "decode_tokens_per_second": said["predicted_per_second"]}

    return _best(once)


def _openvino(file: Path, tokenizer: Path) -> Speed:
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(str(file.parent), "CPU")
    config = openvino_genai.GenerationConfig(max_new_tokens=NEW, ignore_eos=True, apply_chat_template=False)
    text = _text(tokenizer)

    def once() -> Speed:
        found = pipeline.generate([text], config).perf_metrics
        return {
            "prefill_seconds": found.get_ttft().mean / 1e3,
            "decode_tokens_per_second": 1e3 / found.get_tpot().mean,
        }

    return _best(once)


def _executorch(file: Path, tokenizer: Path) -> Speed:
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    runner, text = TextLLMRunner(str(file), str(tokenizer)), _text(tokenizer)
    config = GenerationConfig(max_new_tokens=NEW, temperature=0.0, echo=False)

    def once() -> Speed:
        runner.reset()
        times = [time.perf_counter()]
        runner.generate(text, config, lambda _: times.append(time.perf_counter()))
        found = {"prefill_seconds": times[1] - times[0]}
        if len(times) > NEW // 2:  # this runner stops at the end of a text, and a few tokens give no speed
            found["decode_tokens_per_second"] = (len(times) - 2) / (times[-1] - times[1])
        return found

    return _best(once)


def _litert(file: Path, _: Path) -> Speed:
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(file), num_threads=usable_cores())
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
        times = [time.perf_counter()]
        cache = calls["prefill"](**given("prefill", {}, 0))
        times.append(time.perf_counter())
        for place in range(PROMPT, PROMPT + NEW):
            cache = calls["decode"](**given("decode", cache, place))
            times.append(time.perf_counter())
        return {"prefill_seconds": times[1] - times[0], "decode_tokens_per_second": NEW / (times[-1] - times[1])}

    return _best(once)


def _torch(load: Callable[[Path], Callable[..., object]], file: Path) -> Speed:
    import torch

    described = file.with_name({"model.pt": "torchscript.json", "model.pt2": "torch_export.json"}[file.name])
    ids = torch.arange(3, 3 + PROMPT)[None]
    given: tuple[object, ...] = (ids,)
    if described.is_file():
        cache = [torch.zeros(1, heads, 0, width) for heads, width in json.loads(described.read_text())["cache"]]
        given = (ids, torch.ones_like(ids), torch.arange(PROMPT)[None], cache)
    call = load(file)

    def once() -> Speed:
        begin = time.perf_counter()
        call(*given)
        return {"prefill_seconds": time.perf_counter() - begin}

    with torch.no_grad():
        return _best(once)  # the first calls compile


def _torchscript(file: Path, _: Path) -> Speed:
    import torch

    return _torch(lambda path: torch.jit.load(str(path)), file)


def _torch_export(file: Path, _: Path) -> Speed:
    import torch

    return _torch(lambda path: torch.export.load(str(path)).module(), file)


RUNTIMES: dict[str, Callable[[Path, Path], Speed]] = {
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
    "executorch": _executorch,
    "litert": _litert,
    "torchscript": _torchscript,
    "torch_export": _torch_export,
}


if __name__ == "__main__":
    runtime, *paths = sys.argv[1:]
    print(json.dumps(RUNTIMES[runtime](*map(Path, paths))))
