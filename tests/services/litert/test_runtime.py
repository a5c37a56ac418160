"""LiteRT's interpreter on stored programs, against PyTorch with the weights they were made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.models.litert_programs import CALL, FOLDER, PLACES

from .conftest import torch_results

pytest.importorskip("ai_edge_litert", reason="the extra validate is not installed with LiteRT's interpreter")

LIMIT = 1e-5


def loaded(folder: Path) -> Any:
    from slipway_litert.runtime import load

    return load(folder, threads=1)


def step(ids: np.ndarray, mask: np.ndarray, start: int = 0, past: Any = None) -> Any:
    """Return the call of columns from ``start`` on."""
    from slipway.proof.runtime import Step, positions_of

    return Step(ids[:, start:], mask, positions_of(mask)[:, start:], past)


def tokens(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(4, 64, (rows, length))


@pytest.mark.parametrize("first", [1, CALL, CALL + 1, PLACES - 1])
def test_rows_continue_from_their_own_cache_to_the_last_place(first: int) -> None:
    ids = tokens(2, PLACES)
    mask = np.ones_like(ids)
    mask[0, :2] = 0
    model = loaded(FOLDER / "decoder")
    head, past = model.forward(step(ids[:, :first], mask[:, :first])) if first > 2 else (None, None)
    tail, _ = model.forward(step(ids, mask, first if past else 0, past))
    found = tail if head is None else np.concatenate([head, tail], axis=1)
    wanted = torch_results(FOLDER / "decoder", ids, mask)
    real = mask.astype(bool)
    assert np.abs(found[real] - wanted[real]).max() < LIMIT
    assert np.abs(wanted[real]).max() > 1e-2  # the limit means something


def test_texts_of_classes_with_padding() -> None:
    ids = tokens(3, PLACES - 1)
    mask = np.ones_like(ids)
    mask[1, 4:], ids[1, 4:] = 0, 1
    found, past = loaded(FOLDER / "classes").forward(step(ids, mask))
    assert past is None
    assert np.abs(found - torch_results(FOLDER / "classes", ids, mask)).max() < LIMIT


def test_texts_beyond_the_program_are_not_run() -> None:
    from slipway.proof.runtime import NotRunnable

    ids = tokens(1, PLACES + 1)
    with pytest.raises(NotRunnable, match="room for 12 tokens, and the samples have 13: set max_length"):
        loaded(FOLDER / "decoder").forward(step(ids, np.ones_like(ids)))
    with pytest.raises(NotRunnable, match="takes 12 tokens, and the samples have 13"):
        loaded(FOLDER / "classes").forward(step(ids, np.ones_like(ids)))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("cut", "LiteRT cannot load model.tflite"),
        ("text", "LiteRT cannot load model.tflite"),
        ("missing", "LiteRT cannot load model.tflite"),
        ("other family", "lacks the signatures prefill and decode of a decoder"),
        ("other model", "lacks signatures text_N"),
    ],
)
def test_what_is_no_program_of_the_model_is_unusable(tmp_path: Path, fault: str, says: str) -> None:
    from slipway.proof.runtime import Unusable

    folder = shutil.copytree(FOLDER / "classes", tmp_path / "litert")
    file, config = folder / "model.tflite", folder / "config.json"
    match fault:
        case "cut":
            file.write_bytes(file.read_bytes()[:1000])
        case "text":
            file.write_text("no flatbuffer")
        case "missing":
            file.unlink()
        case "other family":
            config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}))
        case _:
            shutil.copy(FOLDER / "decoder" / "model.tflite", file)
    with pytest.raises(Unusable, match=says):
        loaded(folder)
