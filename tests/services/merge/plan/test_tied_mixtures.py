"""Tied weights of which one is trained in one way and the other in another, and rows of a vocabulary that was resized.

Adapters are trained for a few steps: what is saved, and under which names, is what peft really leaves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model

from slipway.errors import ModelMergeError
from slipway.model.adapters.adapter_config import UNMERGED_REMEDY
from support.models.merge_cases import TOKENS, VOCAB, Case, load, logits, make_model

RESIZED = VOCAB + 8


def trained(folder, kind: str, *, vocab: int, **lora: Any) -> Case:
    """A base and an adapter after real steps on tokens of the whole vocabulary."""
    model = make_model(kind)
    model.save_pretrained(folder / "base")
    if vocab != VOCAB:
        model.resize_token_embeddings(vocab, mean_resizing=False)
    model.name_or_path = str(folder / "base")
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=10, task_type="CAUSAL_LM", **lora))
    optimizer = torch.optim.AdamW([weight for weight in tuned.parameters() if weight.requires_grad], lr=2e-2)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        tokens = torch.randint(0, vocab, (4, 10), generator=generator)
        tuned(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.save_pretrained(folder / "adapter")
    (folder / "work").mkdir()
    return Case(folder / "base", folder / "adapter", folder / "work")


def check(case: Case, *, vocab: int) -> None:
    """The merged model computes what base and adapter compute."""
    out, ctx = case.merge(verify="full")
    assert "logits_difference" in ctx.facts["verified"]
    base = tf.AutoModelForCausalLM.from_pretrained(case.base, dtype=torch.float32)
    before = logits(base)
    if vocab != VOCAB:
        base.resize_token_embeddings(vocab, mean_resizing=False)
    expected = logits(PeftModel.from_pretrained(base, case.adapter).eval())
    merged = logits(load(out, dtype=torch.float32))
    assert (expected[..., :VOCAB] - before).abs().max() > 1e-2
    assert torch.allclose(merged, expected, atol=1e-5 * float(expected.abs().max()))


MIXED: dict[str, dict[str, Any]] = {
    "lora-and-saved": {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    "dora-and-saved": {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"], "use_dora": True},
    "saved-and-lora": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("options", MIXED.values(), ids=MIXED)
def test_what_is_saved_along_for_one_does_not_replace_the_other(tmp_path, options):
    check(trained(tmp_path, "qwen3-tied", vocab=VOCAB, **options), vocab=VOCAB)


GROWN: dict[str, dict[str, Any]] = {
    "saved-head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "lora-and-saved": {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [3, VOCAB, VOCAB + 1]},
    "rows-by-module": {
        "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [VOCAB, 4], "lm_head": [VOCAB + 1, 5]},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
@pytest.mark.parametrize("options", GROWN.values(), ids=GROWN)
def test_with_new_tokens(tmp_path, kind, options):
    assert TOKENS.max() < RESIZED
    check(trained(tmp_path, kind, vocab=RESIZED, **options), vocab=RESIZED)


def test_rows_that_lie_below_another_adapter_are_refused(tmp_path):
    """peft replaces the rows in the tied output head too, and adds the product to that."""
    options = {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [1, 2]}
    case = trained(tmp_path / "tied", "qwen3-tied", vocab=VOCAB, **options)
    with pytest.raises(ModelMergeError) as caught:
        case.merge(verify="spot")
    assert caught.value.reason == "ADAPTER_UNSUPPORTED"
    assert "'lm_head.weight' is tied to 'model.embed_tokens.weight'" in caught.value.message
    assert caught.value.remedy == UNMERGED_REMEDY
    check(trained(tmp_path / "untied", "qwen3", vocab=VOCAB, **options), vocab=VOCAB)
