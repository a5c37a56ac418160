"""The reference runs every form of adapter that can be merged, deeper models included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipway.proof.runtime import padded, run_segments
from slipway_validate.runner.runtime_reference import load
from support.models import tiny_models

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
    ids, mask = padded([np.arange(1, 11), np.arange(20, 27)], side="left", token=0)
    (_, whole), *_ = run_segments(model, ids, mask, (10,))
    pieces = np.concatenate([logits for _, logits in run_segments(model, ids, mask, (6, 1, 3))], axis=1)
    real = mask.astype(bool)
    assert np.abs(whole - pieces)[real].max() < 1e-4
    with model.without_adapter():
        (_, plain), *_ = run_segments(model, ids, mask, (10,))
    assert np.abs(whole - plain)[real].max() > 1e-3


def trained(model: peft.PeftModel) -> np.ndarray:
    """Logits of the model in memory, in float32."""
    with torch.no_grad():
        return model.float().eval()(input_ids=torch.arange(1, 11)[None]).logits.numpy()


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3]}], ids=str)
@pytest.mark.parametrize("change", [5, -3])
def test_a_vocabulary_that_was_resized(
    base: Path, tmp_path: Path, options: dict[str, list[object]], change: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.get_input_embeddings().num_embeddings + change, mean_resizing=False)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **TASK, **options)
    tuned = peft.get_peft_model(model, config)
    tuned.save_pretrained(tmp_path / "adapter")
    ids, mask = padded([np.arange(1, 11)], side="left", token=0)
    (_, logits), *_ = run_segments(load(base, tmp_path / "adapter", threads=1), ids, mask, (10,))
    assert np.allclose(logits, trained(tuned), atol=1e-5)


def test_tied_factors_that_came_apart_are_each_their_own(base: Path, tmp_path: Path) -> None:
    """A bfloat16 base makes peft train them apart; loaded in float32 it would give the head those of the embedding."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    config = peft.LoraConfig(
        r=4, target_modules=["embed_tokens"], ensure_weight_tying=True, init_lora_weights=False, **TASK
    )
    tuned = peft.get_peft_model(model, config)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    tuned.save_pretrained(tmp_path / "adapter")
    ids, mask = padded([np.arange(1, 11)], side="left", token=0)
    (_, logits), *_ = run_segments(load(base, tmp_path / "adapter", threads=1), ids, mask, (10,))
    expected = trained(tuned)
    assert np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()
