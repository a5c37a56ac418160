"""llama.cpp computes what transformers computes, and with an adapter what peft computes, for every architecture that is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from support.models.gguf_models import (
    FAMILIES,
    VOCABULARY,
    llama_distributions,
    save_adapter,
    save_family,
    torch_distributions,
    write_adapter,
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
def test_distributions_are_those_of_transformers_and_of_peft(family: str, tmp_path: Path) -> None:
    model, most = save_family(family, tmp_path / "base"), _BY_TABLE.get(family, 2e-5)
    expected = torch_distributions(model, _TOKENS)
    tuned = torch_distributions(save_adapter(model, tmp_path / "adapter"), _TOKENS)
    assert expected.std() > 0.1  # the model is not undecided, so that a wrong graph shows
    assert np.abs(tuned - expected).max() > 0.3  # the adapter changes what the base says
    base, _ = write_gguf(tmp_path / "base", tmp_path / "work", level="f32")
    adapter, _ = write_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "beside")
    assert np.abs(llama_distributions(base, _TOKENS) - expected).max() < most
    assert np.abs(llama_distributions(base, _TOKENS, adapter=adapter) - tuned).max() < most


@pytest.mark.slow
def test_levels_are_as_far_off_as_their_types(tmp_path: Path) -> None:
    expected = torch_distributions(save_family("qwen3", tmp_path / "model"), _TOKENS)
    for level, most in (("f16", 1e-5), ("q8_0", 1e-3), ("q4_k_m", 5e-2)):
        file, _ = write_gguf(tmp_path / "model", tmp_path / level, level=level)
        found = llama_distributions(file, _TOKENS)
        assert (np.exp(expected) * (expected - found)).sum(-1).mean() < most, level
