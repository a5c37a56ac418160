"""llama.cpp computes what transformers computes, for every architecture that is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from support.models.gguf_models import (
    FAMILIES,
    VOCABULARY,
    llama_distributions,
    save_family,
    torch_distributions,
    write_gguf,
)

pytestmark = pytest.mark.own_process

_TOKENS = np.random.default_rng(3).integers(3, VOCABULARY, 24).tolist()
_BY_TABLE = {"gemma2": 5e-3, "gemma3": 5e-3, "gpt2": 5e-3}
"""Largest difference where llama.cpp looks GELU up in a table of float16."""
_FAST = ("llama", "qwen3")


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in _FAST else pytest.mark.slow) for each in FAMILIES]
)
def test_distributions_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    expected = torch_distributions(model, _TOKENS)
    found = llama_distributions(file, _TOKENS)
    assert expected.std() > 0.1  # the model is not undecided, so that a wrong graph shows
    assert np.abs(found - expected).max() < _BY_TABLE.get(family, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "most"), [("f16", 1e-5), ("q8_0", 1e-3), ("q4_k_m", 5e-2)])
def test_levels_are_as_far_off_as_their_types(level: str, most: float, tmp_path: Path) -> None:
    model = save_family("qwen3", tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level=level)
    expected = torch_distributions(model, _TOKENS)
    found = llama_distributions(file, _TOKENS)
    assert (np.exp(expected) * (expected - found)).sum(-1).mean() < most
