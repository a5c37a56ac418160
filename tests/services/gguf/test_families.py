"""llama.cpp computes what transformers computes, and with an adapter what peft computes, for every architecture that is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from support.models.gguf_families import FAMILIES
from support.models.gguf_models import (
    compute_like_llama,
    llama_distributions,
    save_adapter,
    save_family,
    torch_distributions,
    write_adapter,
    write_gguf,
)
from support.models.gguf_sizes import VOCABULARY

pytestmark = pytest.mark.own_process

_TOKENS = np.random.default_rng(3).integers(3, VOCABULARY - 20, 24).tolist()  # Gemma 3n embeds no others in its layers


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if each.fast else pytest.mark.slow) for name, each in FAMILIES.items()]
)
def test_distributions_are_those_of_transformers_and_of_peft(family: str, tmp_path: Path) -> None:
    model, most = save_family(family, tmp_path / "base"), FAMILIES[family].most
    compute_like_llama(model)
    expected = torch_distributions(model, _TOKENS)
    tuned = torch_distributions(save_adapter(model, tmp_path / "adapter", without=FAMILIES[family].untrained), _TOKENS)
    assert expected.std() > 0.1  # the model is not undecided, so that a wrong graph shows
    assert np.abs(tuned - expected).max() > 0.2  # the adapter changes what the base says
    base, _ = write_gguf(tmp_path / "base", tmp_path / "work", level="f32")
    adapter, _ = write_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "beside")
    distances = np.abs(llama_distributions(base, _TOKENS) - expected).max(-1)
    assert distances.max() < most
    assert np.median(distances) < most / 5 + 2e-5  # also where single values are looked up in a table
    # What layers keep of the first tokens is what the next ones need.
    assert np.abs(llama_distributions(base, _TOKENS, at_once=9) - expected).max() < most
    assert np.abs(llama_distributions(base, _TOKENS, adapter=adapter) - tuned).max() < most


@pytest.mark.slow
def test_levels_are_as_far_off_as_their_types(tmp_path: Path) -> None:
    expected = torch_distributions(save_family("qwen3", tmp_path / "model"), _TOKENS)
    for level, most in (("f16", 1e-5), ("q8_0", 1e-3), ("q4_k_m", 5e-2)):
        file, _ = write_gguf(tmp_path / "model", tmp_path / level, level=level)
        found = llama_distributions(file, _TOKENS)
        assert (np.exp(expected) * (expected - found)).sum(-1).mean() < most, level
