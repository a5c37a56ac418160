"""A sentence encoder's graph gives the vector of the text, as the files of sentence-transformers say; judged by numpy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.models.family_models import make_family_model
from support.models.onnx_models import Exported
from support.models.sentence_models import write_modules

SLOW = pytest.mark.slow
LEGACY = {"engine": "legacy", "opset": 14}
IDS = np.array([[0, 9, 12, 30, 2], [0, 7, 2, 1, 1], [0, 2, 1, 1, 1]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])


def run(folder: Path) -> dict[str, Any]:
    import onnxruntime

    graph = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [value.name for value in graph.get_outputs()]
    return dict(zip(names, graph.run(names, {"input_ids": IDS, "attention_mask": MASK}), strict=True))


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
        pytest.param(("cls",), False, LEGACY, marks=SLOW),
        pytest.param(("max", "mean"), True, LEGACY, marks=SLOW),
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
