"""A sentence encoder's graph gives the vector of the text, as the files of sentence-transformers say; judged by numpy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.models.family_models import make_family_model
from support.models.onnx_models import Exported
from support.models.sentence_models import write_dense, write_modules

SLOW = pytest.mark.slow
LEGACY = {"engine": "legacy", "opset": 14}
IDS = np.array([[0, 9, 12, 30, 2], [0, 7, 2, 1, 1], [0, 2, 1, 1, 1]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])


def padded(side: str) -> tuple[Any, Any]:
    if side == "right":
        return IDS, MASK
    counts = MASK.sum(axis=1)
    shifted = [np.roll(row, len(row) - count) for row, count in zip(IDS, counts, strict=True)]
    return np.stack(shifted), MASK[:, ::-1].copy()


def run(folder: Path, *, side: str = "right") -> dict[str, Any]:
    import onnxruntime

    graph = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [value.name for value in graph.get_outputs()]
    ids, mask = padded(side)
    return dict(zip(names, graph.run(names, {"input_ids": ids, "attention_mask": mask}), strict=True))


def by_hand(hidden: Any, mode: str) -> Any:
    rows = [row[mask.astype(bool)] for row, mask in zip(hidden, MASK, strict=True)]
    places = [np.arange(1, len(row) + 1)[:, None] for row in rows]
    made = {
        "cls": [row[0] for row in rows],
        "lasttoken": [row[-1] for row in rows],
        "max": [row.max(axis=0) for row in rows],
        "mean": [row.mean(axis=0) for row in rows],
        "mean_sqrt_len_tokens": [row.sum(axis=0) / len(row) ** 0.5 for row in rows],
        "weightedmean": [(row * at).sum(axis=0) / at.sum() for row, at in zip(rows, places, strict=True)],
    }
    return np.stack(made[mode])


@pytest.mark.parametrize(
    ("modes", "normalized", "params"),
    [
        (("mean",), True, {}),
        pytest.param(("cls", "max"), True, LEGACY, marks=SLOW),
        pytest.param(("lasttoken", "mean_sqrt_len_tokens", "weightedmean"), False, {}, marks=SLOW),
    ],
)
def test_the_vector_of_a_text_is_an_output(
    tmp_path: Path, export: Callable[..., Exported], modes: tuple[str, ...], normalized: bool, params: dict[str, Any]
) -> None:
    source = make_family_model("bert-features", tmp_path / "model")
    write_modules(source, settings={"pooling_mode": list(modes)}, normalized=normalized)
    exported = export(source, **params)
    assert exported.facts["parity"] == "passed"
    found = run(exported.folder)
    wanted = np.concatenate([by_hand(found["last_hidden_state"], mode) for mode in modes], axis=1)
    if normalized:
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.abs(found["sentence_embedding"] - wanted).max() < 1e-5
    assert (exported.folder / "1_Pooling" / "config.json").is_file()
    command = [sys.executable, "-P", exported.folder / "example.py", "a house by the sea"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == wanted.shape[1]


@SLOW
def test_a_pooling_that_is_not_known_is_left_out_with_a_warning(
    tmp_path: Path, export: Callable[..., Exported]
) -> None:
    source = make_family_model("bert-features", tmp_path / "model")
    write_modules(source, modules=["Transformer", "Pooling", "Dense"])
    exported = export(source, **LEGACY)
    assert list(run(exported.folder)) == ["last_hidden_state"]
    (warning,) = [said for said in exported.facts["warnings"] if "sentence_embedding" in said]
    assert "Dense" in warning


_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_MASKED = {**_SIZES, "max_position_embeddings": 64, "pad_token_id": 1}
_CAUSAL = {**_SIZES, "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 8}
_NAMED_OTHERWISE = {
    "mpnet": (lambda tf: tf.MPNetModel(tf.MPNetConfig(**_MASKED)), "MPNetForMaskedLM", "mean", "right"),
    "qwen3": (lambda tf: tf.Qwen3Model(tf.Qwen3Config(**_CAUSAL)), "Qwen3ForCausalLM", "lasttoken", "left"),
    "whole": (
        lambda tf: tf.BertForMaskedLM(tf.BertConfig(**_MASKED, type_vocab_size=1)),
        "BertForMaskedLM",
        "cls",
        "right",
    ),
}
"""Model in the folder, the class that its config.json names, the pooling, and the side of the padding."""


@pytest.mark.parametrize(
    ("kind", "params"),
    [("mpnet", LEGACY), pytest.param("qwen3", {}, marks=SLOW), pytest.param("whole", LEGACY, marks=SLOW)],
    ids=["mpnet-legacy", "qwen3-auto", "whole-legacy"],
)
def test_a_sentence_encoder_of_another_class_is_the_base_model_with_its_pooling(
    tmp_path: Path, export: Callable[..., Exported], kind: str, params: dict[str, Any]
) -> None:
    """sentence-transformers saves the base model under the class that it found; the graph is judged by transformers."""
    make, named, mode, side = _NAMED_OTHERWISE[kind]
    source = saved_under(named, make, tmp_path / "model")
    write_modules(source, settings={"pooling_mode": mode}, normalized=True)
    exported = export(source, **params)
    assert (exported.facts["family"], exported.facts["parity"]) == ("feature extraction", "passed")
    found = run(exported.folder, side=side)["sentence_embedding"]
    assert np.abs(found - by_transformers(source, mode, side=side)).max() < 1e-5


def saved_under(named: str, make: Callable[[Any], Any], folder: Path) -> Path:
    """Save a model whose config.json names another class."""
    import torch
    import transformers

    from support.models.tiny_models import save_tokenizer

    torch.manual_seed(7)
    make(transformers).eval().save_pretrained(folder)
    save_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [named]}))
    return folder


def by_transformers(source: Path, mode: str, *, side: str) -> Any:
    """Each text alone, without padding."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(source).eval()
    with torch.no_grad():
        rows = [
            model(input_ids=torch.tensor([ids[mask.astype(bool)]])).last_hidden_state[0].numpy()
            for ids, mask in zip(*padded(side), strict=True)
        ]
    vectors = {
        "mean": [row.mean(axis=0) for row in rows],
        "lasttoken": [row[-1] for row in rows],
        "cls": [row[0] for row in rows],
    }
    return np.stack([vector / np.linalg.norm(vector) for vector in vectors[mode]])


@SLOW
def test_linear_layers_behind_the_pooling_of_a_two_way_decoder(tmp_path: Path, export: Callable[..., Exported]) -> None:
    """EmbeddingGemma: attention in both directions, a pooling of the mean, two linear layers, vectors of length 1."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4, "pad_token_id": 1}
    config = tf.Gemma3TextConfig(**sizes, **heads, max_position_embeddings=64, use_bidirectional_attention=True)
    model = tf.Gemma3TextModel(config).eval()
    model.save_pretrained(tmp_path / "model")
    names = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    folder = write_modules(tmp_path / "model", modules=names, dense=identity)
    layers = [write_dense(folder / f"{at + 2}_Dense", (32, 96)[:: 1 - 2 * at], bias=False, seed=at) for at in (0, 1)]
    exported = export(folder)
    assert exported.facts["parity"] == "passed"
    found = run(exported.folder)["sentence_embedding"]
    with torch.no_grad():
        hidden = model(torch.from_numpy(IDS), torch.from_numpy(MASK)).last_hidden_state.numpy()
    wanted = by_hand(hidden, "mean")
    for layer in layers:
        wanted = wanted @ layer["linear.weight"].numpy().T
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.abs(found - wanted).max() < 1e-5
