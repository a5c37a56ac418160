"""The reference runs every form of adapter that can be merged, deeper models included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_models
from slipway_validate.model import left_padded, run_segments
from slipway_validate.runtime_reference import load

TASK = {"task_type": "CAUSAL_LM"}
FORMS = {
    "dora": peft.LoraConfig(r=4, lora_alpha=6, use_dora=True, target_modules=["q_proj"], init_lora_weights=False, **TASK),
    "deeper": peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)], init_lora_weights=False, **TASK
    ),
    "loha": peft.LoHaConfig(r=4, alpha=6, target_modules=["q_proj"], init_weights=False, **TASK),
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False, **TASK
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_base(tmp_path_factory.mktemp("forms") / "base")


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_computes_the_same_with_its_cache(base: Path, tmp_path: Path, form: str) -> None:
    torch.manual_seed(2)
    tuned = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), FORMS[form])
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    tuned.save_pretrained(tmp_path / form)
    model = load(base, tmp_path / form, threads=1)
    ids, mask = left_padded([np.arange(1, 11), np.arange(20, 27)])
    (_, whole), *_ = run_segments(model, ids, mask, (10,))
    pieces = np.concatenate([logits for _, logits in run_segments(model, ids, mask, (6, 1, 3))], axis=1)
    real = mask.astype(bool)
    assert np.abs(whole - pieces)[real].max() < 1e-4
    with model.without_adapter():
        (_, plain), *_ = run_segments(model, ids, mask, (10,))
    assert np.abs(whole - plain)[real].max() > 1e-3
