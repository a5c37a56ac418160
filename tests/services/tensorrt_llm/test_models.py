"""A reader that knows only the checkpoint computes what transformers computes, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.models.tensorrt_llm_models import MODELS, Reader, logits_of, save_model, write_checkpoint

_TOKENS = torch.randint(3, 100, (24,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path / "model")
    expected = logits_of(model, _TOKENS)
    assert expected.std() > 0.1  # the model is not undecided, so that a wrong order shows
    divisions = [(1, 1), (2, 1)] if name.startswith("phi3") else [(1, 1), (2, 1), (1, 2), (2, 2)]
    for tp, pp in divisions:
        folder, _ = write_checkpoint(tmp_path / "model", tmp_path / f"tp{tp}pp{pp}", tp=tp, pp=pp)
        assert (Reader(folder).logits(_TOKENS) - expected).abs().max() < 1e-5, f"tp {tp}, pp {pp}"
