"""Graphs of every family compute what transformers computes, judged by code of the test's own; one fast case of each kind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.errors import ModelExportError
from support.models.family_models import CASES, make_family_model
from support.models.onnx_models import Exported

LIMIT = 1e-4
SLOW = pytest.mark.slow
LEGACY = {"engine": "legacy", "opset": 14}
READERS = (
    ("bert-classes", LEGACY),
    ("bert-classes", {}),
    *(pytest.param(name, LEGACY, marks=SLOW) for name in ("bart-classes", "bert-tokens", "roberta-questions")),
    *(pytest.param(name, {}, marks=SLOW) for name in ("bart-classes", "llama-classes-unpadded")),
)
PAIRS = (
    ("marian-two-vocabularies", LEGACY),
    pytest.param("t5", {}, marks=SLOW),
)
EXAMPLES = ("bert-tokens", "roberta-questions")
"""Models whose folder's example is run too; other tests run that of other kinds."""


def named(value: Any) -> str:
    """Return a part of a test's id: a model, or the engine of parameters."""
    return value if isinstance(value, str) else value.get("engine", "dynamo")


def session(folder: Path, name: str) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])


def run(graph: Any, feed: dict[str, Any]) -> dict[str, Any]:
    names = [value.name for value in graph.get_outputs()]
    return dict(zip(names, graph.run(names, feed), strict=True))


def loaded(name: str, folder: Path) -> Any:
    return type(CASES[name].model()).from_pretrained(folder).eval()


def rows_of_text(count: int) -> tuple[Any, Any]:
    """Rows of different lengths, padded on the right; each ends with the end of a text."""
    ids = np.random.default_rng(3).integers(3, 48, size=(count, 9))
    mask = np.ones_like(ids)
    for row in range(count):
        end = 9 - 2 * row
        ids[row, end - 1], ids[row, end:], mask[row, end:] = 2, 1, 0
    return ids, mask


@pytest.mark.parametrize(("name", "params"), READERS, ids=named)
def test_models_that_read_a_text_in_one_call(
    tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any]
) -> None:
    import torch

    source = make_family_model(name, tmp_path / "model")
    exported = export(source, **params)
    assert exported.facts["parity"] == "passed"
    ids, mask = rows_of_text(1 if "unpadded" in name else 3)
    graph, model = session(exported.folder, "model.onnx"), loaded(name, source)
    feed = {"input_ids": ids, "attention_mask": mask}
    found = run(graph, feed)
    with torch.no_grad():
        wanted = model(**{key: torch.from_numpy(value) for key, value in feed.items()})
    for output, value in found.items():
        reference = wanted[output].numpy()
        kept = mask.astype(bool) if reference.shape[:2] == mask.shape else ...
        assert np.abs(value[kept] - reference[kept]).max() < LIMIT
    if name in EXAMPLES:
        said_by_example(exported.folder)


@pytest.mark.parametrize(("name", "params"), PAIRS, ids=named)
def test_encoder_decoders_over_ten_steps(
    tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any]
) -> None:
    import torch

    source = make_family_model(name, tmp_path / "model")
    exported = export(source, **params)
    assert exported.facts["parity"] == "passed"
    encoder, decoder = (session(exported.folder, f"{part}_model.onnx") for part in ("encoder", "decoder"))
    ids, mask = rows_of_text(3)
    ids = np.where(ids < 48, ids, 3)
    encoded = run(encoder, {"input_ids": ids, "attention_mask": mask})
    crossed = {key: value for key, value in encoded.items() if key.startswith("present.")}
    assert crossed
    assert all(value.shape[2] == ids.shape[1] for value in crossed.values())  # no zero-length cross-attention
    cache = {key.replace("present.", "past_key_values."): value for key, value in crossed.items()}
    for value in decoder.get_inputs():
        if ".decoder." in value.name:
            cache[value.name] = np.zeros((3, value.shape[1], 0, value.shape[3]), np.float32)
    model = loaded(name, source)
    tokens = np.ones((3, 1), np.int64)
    order = [0, 1, 2]
    for step in range(10):
        found = run(decoder, {"input_ids": tokens[:, -1:], "encoder_attention_mask": mask[order], **cache})
        assert not [key for key in found if ".encoder." in key]  # the decoder returns its own cache alone
        cache |= {
            key.replace("present.", "past_key_values."): found[key] for key in found if key.startswith("present.")
        }
        with torch.no_grad():
            wanted = (
                model(
                    input_ids=torch.from_numpy(ids[order]),
                    attention_mask=torch.from_numpy(mask[order]),
                    decoder_input_ids=torch.from_numpy(tokens),
                )
                .logits[:, -1]
                .numpy()
            )
        assert np.abs(found["logits"][:, -1] - wanted).max() < LIMIT
        tokens = np.concatenate([tokens, wanted.argmax(-1)[:, None]], axis=1)
        if step == 3:  # as a beam search does
            beam = [2, 0, 2]
            order, tokens = [order[row] for row in beam], tokens[beam]
            cache = {key: value[beam] for key, value in cache.items()}


@SLOW
def test_speech(tmp_path: Path, export: Callable[..., Exported]) -> None:
    import torch

    source = make_family_model("whisper", tmp_path / "model")
    exported = export(source)
    features = np.random.default_rng(3).standard_normal((2, 8, 32)).astype(np.float32)
    encoded = run(session(exported.folder, "encoder_model.onnx"), {"input_features": features})
    model = loaded("whisper", source)
    with torch.no_grad():
        wanted = model.get_encoder()(torch.from_numpy(features)).last_hidden_state.numpy()
    assert np.abs(encoded["last_hidden_state"] - wanted).max() < LIMIT
    assert exported.facts["parity_max_abs_diff"] < LIMIT


def test_a_weight_of_both_graphs_is_stored_once(tmp_path: Path, export: Callable[..., Exported]) -> None:
    import onnx

    source = make_family_model("bart", tmp_path / "model")
    exported = export(source, parity="never", **LEGACY)
    places = [
        {entry.key: entry.value for entry in tensor.external_data}["location"]
        for name in ("encoder_model.onnx", "decoder_model.onnx")
        for tensor in onnx.load(exported.folder / name, load_external_data=False).graph.initializer
        if tensor.name == "model.shared.weight"
    ]
    assert places == ["encoder_model.onnx.data"] * 2


def test_a_lost_weight_is_named(tmp_path: Path, export: Callable[..., Exported]) -> None:
    from safetensors.torch import load_file, save_file

    source = make_family_model("bert-classes", tmp_path / "model")
    weights = load_file(source / "model.safetensors")
    del weights["bert.encoder.layer.1.output.dense.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelExportError) as caught:
        export(source)
    assert caught.value.reason == "BASE_MODEL_INVALID"
    assert "bert.encoder.layer.1.output.dense.weight" in caught.value.message


def said_by_example(folder: Path) -> str:
    words = [sys.executable, "-P", folder / "example.py", "a house by the sea"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_folder_s_example_runs(tmp_path: Path, export: Callable[..., Exported]) -> None:
    folder = export(make_family_model("bert-classes", tmp_path / "model"), parity="never", **LEGACY).folder
    labels = json.loads((folder / "config.json").read_text())["id2label"].values()
    assert {line.split()[0] for line in said_by_example(folder).splitlines()} == set(labels)


def test_graphs_for_tensorrt_are_made_of_decoders_and_encoders_only(
    tmp_path: Path, export: Callable[..., Exported]
) -> None:
    with pytest.raises(ModelExportError) as caught:
        export(make_family_model("marian", tmp_path / "model"), runtime="tensorrt")
    assert caught.value.reason == "FAMILY_UNSUPPORTED"
