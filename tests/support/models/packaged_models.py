"""Run packaged graphs as the runtimes do that the packages are for."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[dict[str, Any]], dict[str, Any]]
WORDS = "the of and to in"
LEGACY = {"engine": "legacy", "opset": 14}


def session(path: Path) -> tuple[Any, Run]:
    import onnxruntime

    graph = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in graph.get_outputs()]
    taken = {value.name for value in graph.get_inputs()}

    def run(feed: dict[str, Any]) -> dict[str, Any]:
        return dict(
            zip(names, graph.run(names, {name: each for name, each in feed.items() if name in taken}), strict=True)
        )

    return graph, run


def cached(found: dict[str, Any]) -> dict[str, Any]:
    return {
        name.replace("present.", "past_key_values.", 1): value
        for name, value in found.items()
        if name.startswith("present.")
    }


def empty_cache(graph: Any, rows: int, *, of: str = "") -> dict[str, Any]:
    dtypes = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    return {
        value.name: np.zeros((rows, value.shape[1], 0, value.shape[3]), dtypes[value.type])
        for value in graph.get_inputs()
        if value.name.startswith("past_key_values.") and of in value.name
    }


def padded_source(name: str) -> dict[str, Any]:
    """Inputs of an encoder of ``family_models``: three rows with padding on both sides, or three sounds."""
    random = np.random.default_rng(0)
    ids, mask = random.integers(3, 40, (3, 9)), np.ones((3, 9), np.int64)
    mask[1, :4] = mask[2, 6:] = 0
    if name == "whisper":
        return {"input_features": random.normal(size=(3, 8, 32)).astype(np.float32)}
    return {"input_ids": np.where(mask == 1, ids, 1), "attention_mask": mask}


def steps_of_two_files(folder: Path, source: dict[str, Any], *, start: int, steps: int) -> list[Any]:
    """Logits of a greedy decoding by the encoder and the decoder, reordered as a beam search does."""
    _, encode = session(folder / "encoder_model.onnx")
    graph, decode = session(folder / "decoder_model.onnx")
    rows = len(next(iter(source.values())))
    cache = {**cached(encode(source)), **empty_cache(graph, rows, of=".decoder.")}
    masks = {"encoder_attention_mask": source["attention_mask"]} if "attention_mask" in source else {}
    ids, logits = np.full((rows, 1), start, np.int64), []
    for step in range(steps):
        found = decode({"input_ids": ids, **masks, **cache})
        logits.append(found["logits"])
        cache |= cached(found)
        ids = found["logits"][:, -1:].argmax(-1)
        if step == 3:
            cache, ids, masks = _reordered(cache), _reordered({"": ids})[""], _reordered(masks)
    return logits


def steps_of_merged(encoder: Path, decoder: Path, source: dict[str, Any], *, start: int, steps: int) -> list[Any]:
    """The same by the merged decoder, as transformers.js and optimum call it; every call's cache is checked to be whole."""
    _, encode = session(encoder)
    graph, decode = session(decoder)
    rows = len(next(iter(source.values())))
    hidden = encode(source)["last_hidden_state"]
    cache = empty_cache(graph, rows)
    masks = {"encoder_attention_mask": source["attention_mask"]} if "attention_mask" in source else {}
    ids, logits = np.full((rows, 1), start, np.int64), []
    for step in range(steps):
        branch = {"use_cache_branch": np.array([step > 0]), "encoder_hidden_states": hidden}
        found = decode({"input_ids": ids, **branch, **masks, **cache})
        logits.append(found["logits"])
        cache = cached(found)
        lengths = {value.shape[2] for name, value in cache.items() if ".encoder." in name}
        assert lengths == {hidden.shape[1]}
        ids = found["logits"][:, -1:].argmax(-1)
        if step == 3:
            cache, ids, masks = _reordered(cache), _reordered({"": ids})[""], _reordered(masks)
            hidden = hidden[::-1]
    return logits


def steps_of_three_files(folder: Path, source: dict[str, Any], *, start: int, steps: int) -> list[Any]:
    """The same by optimum's three graphs: the first step without a cache, and the others with it."""
    _, encode = session(folder / "encoder_model.onnx")
    first, begin = session(folder / "decoder_model.onnx")
    _, decode = session(folder / "decoder_with_past_model.onnx")
    assert not [value.name for value in first.get_inputs() if value.name.startswith("past_key_values.")]
    hidden = encode(source)["last_hidden_state"]
    masks = {"encoder_attention_mask": source["attention_mask"]} if "attention_mask" in source else {}
    ids, logits, cache = np.full((len(hidden), 1), start, np.int64), [], {}
    for step in range(steps):
        feed = {"input_ids": ids, **masks}
        found = decode({**feed, **cache}) if step else begin({**feed, "encoder_hidden_states": hidden})
        logits.append(found["logits"])
        cache |= cached(found)
        assert {value.shape[2] for name, value in cache.items() if ".encoder." in name} == {hidden.shape[1]}
        assert {value.shape[2] for name, value in cache.items() if ".decoder." in name} == {step + 1}
        ids = found["logits"][:, -1:].argmax(-1)
        if step == 3:
            cache, ids, masks = _reordered(cache), _reordered({"": ids})[""], _reordered(masks)
    return logits


def _reordered(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: np.ascontiguousarray(value[::-1]) for name, value in tensors.items()}


def at_level(source: Path, level: str, workdir: Path) -> Path:
    """Return the folder at a level; empty: the folder itself."""
    if not level:
        return source
    from slipway.stage import Context
    from slipway_quantize.stage import STAGE

    workdir.mkdir()
    return STAGE.run({"model": source}, STAGE.params(format="onnx", level=level), Context(workdir=workdir))["model"]


def greedy(folder: Path, ids: list[int], count: int) -> list[int]:
    """Continue by the delivered example, which knows nothing of packages."""
    import onnxruntime

    example = runpy.run_path(str(folder / "example.py"), run_name="example")
    found: list[int] = example["generate"](
        onnxruntime.InferenceSession(str(folder / "model.onnx")), ids, max_new_tokens=count
    )
    return found
