"""Programs computed by LiteRT's interpreter, against PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.errors import LiteRtExportError
from slipway.model.families import DECODER, family_of
from support.models.quantize_models import save_tiny
from support.models.table_models import ROWS, Row, make_row

from .conftest import Export, torch_results

LIMIT = 1e-4
EQUAL = (
    *("Gemma 2, window", "Gemma 3, window", "Phi-3", "GPT-2", "SmolLM3"),
    *("BERT, classes", "BERT, masked", "MiniLM, features", "RoBERTa, questions", "XLM-R, tokens", "Qwen3, classes"),
)  # fmt: skip
REFUSED = ("Mixtral", "Whisper")
ROWS_TRIED = [row for row in ROWS if row.name in (*EQUAL, *REFUSED)]


def loaded(folder: Path) -> Any:
    from slipway_litert.runtime import load

    return load(folder, threads=1)


def step(ids: np.ndarray, mask: np.ndarray, start: int = 0, past: Any = None) -> Any:
    """Return the call of columns from ``start`` on."""
    from slipway.proof.runtime import Step, positions_of

    return Step(ids[:, start:], mask, positions_of(mask)[:, start:], past)


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))


def tokens(rows: int, length: int, vocabulary: int = 64) -> np.ndarray:
    return np.random.default_rng(3).integers(4, vocabulary, (rows, length))


@pytest.mark.slow
def test_a_decoder_answers_as_pytorch_however_it_is_called(tmp_path: Path, export: Export) -> None:
    """In calls of several tokens and of one, up to the last place of the cache, with padding, and rows in turn."""
    source = save_tiny(tmp_path / "source")
    folder, ctx = export(source, max_length=20, call_length=8)
    ids = tokens(2, 20)
    wanted = torch_results(source, ids)
    model, mask = loaded(folder), np.ones_like(ids)
    assert (model.bounds.batch, model.bounds.sequence, model.bounds.past) == (1, 20, 19)

    whole, _ = model.forward(step(ids, mask))  # 8 + 8 + four calls of one token: a third of 8 would leave the cache
    assert difference(whole, wanted) < LIMIT
    first, past = model.forward(step(ids[:, :11], mask[:, :11]))
    rest, _ = model.forward(step(ids, mask, 11, past))
    assert difference(np.concatenate([first, rest], axis=1), wanted) < LIMIT

    padded = mask.copy()
    padded[0, :6] = 0
    found, _ = model.forward(step(ids, padded))
    assert difference(found[0, 6:], torch_results(source, ids[:1, 6:])[0]) < LIMIT
    assert difference(found[1], wanted[1]) < LIMIT

    described = json.loads((folder / "litert.json").read_text())
    assert described["precision"] == "float32"
    assert described["size_bytes"] == (folder / "model.tflite").stat().st_size
    assert set(described["signatures"]) == {"prefill", "decode"}
    assert ctx.facts["sha256"] == described["sha256"]


@pytest.mark.slow
def test_integers_are_near_and_smaller(tmp_path: Path, export: Export) -> None:
    source = make_row(next(row for row in ROWS if row.name == "BERT, classes"), tmp_path / "source")
    folder, ctx = export(source, level="int8", max_length=16)
    assert max(ctx.facts["differences_in_float32"].values()) < LIMIT
    assert LIMIT < max(ctx.facts["differences"].values()) < 0.1
    ids = tokens(2, 12)
    found, _ = loaded(folder).forward(step(ids, np.ones_like(ids)))
    assert difference(found, torch_results(source, ids)) < 0.1
    assert loaded(folder).engine.stored_dtype == "int8"


@pytest.mark.slow
def test_a_program_that_computes_something_else_is_refused(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that forgets its scale, which no shape shows."""
    pytest.importorskip("litert_torch", reason="the extra litert is not installed")
    from slipway_litert import modules

    attend = modules.attend

    def forgetful(*given: Any, **others: Any) -> Any:
        return attend(*given, **{**others, "scaling": 1.0})

    monkeypatch.setattr(modules, "attend", forgetful)
    with pytest.raises(LiteRtExportError, match="not what PyTorch computes: results of a text of") as caught:
        export(save_tiny(tmp_path / "source"), max_length=8)
    assert caught.value.reason == "EXPORT_PARITY_FAILED"


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS_TRIED, ids=[row.name for row in ROWS_TRIED])
def test_every_family_is_equal_or_refused(tmp_path: Path, export: Export, row: Row) -> None:
    source = make_row(row, tmp_path / "source")
    try:
        folder, _ = export(source, max_length=40, call_length=16)
    except LiteRtExportError as error:
        assert error.reason in ("FAMILY_UNSUPPORTED", "LITERT_CONVERSION_FAILED", "EXPORT_PARITY_FAILED")
        assert row.name in REFUSED, error
        return
    assert row.name in EQUAL
    ids = tokens(2, 33)
    decoder = family_of(json.loads((source / "config.json").read_text())) is DECODER
    mask = np.ones_like(ids)
    if decoder:
        mask[0, :5] = 0
    else:
        mask[0, -5:] = 0
        ids[0, -5:] = 1
    found, _ = loaded(folder).forward(step(ids, mask))
    wanted = torch_results(source, ids, mask)
    for one, other, real in zip(found, wanted, mask.astype(bool), strict=True):
        if len(other) == len(real):
            assert difference(one[real], other[real]) < LIMIT
        elif other.shape[-1] == len(real):
            assert difference(one[:, real], other[:, real]) < LIMIT
        else:
            assert difference(one, other) < LIMIT
