"""``ensure_weight_tying``: tied weights trained as one stay one; what training did not keep the same is not made the same."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from support.models.merge_cases import load, logits

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
TIED = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"], "use_rslora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "pattern": {"target_modules": ".*(q_proj|lm_head)$"},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
}


def update(case, name: str) -> torch.Tensor:
    """Return a weight's trained update, computed from the saved factors."""
    tensors = load_file(case.adapter / "adapter_model.safetensors")
    start = f"base_model.model.{name}.lora_"
    if f"{start}A.weight" in tensors:
        return tensors[f"{start}B.weight"].double() @ tensors[f"{start}A.weight"].double() * 10 / 4
    return (tensors[f"{start}embedding_B"].double() @ tensors[f"{start}embedding_A"].double()).T * 10 / 4


@pytest.mark.parametrize("options", TIED.values(), ids=TIED)
def test_the_tie_is_kept(make_case, options):
    case = make_case("qwen3-tied", ensure_weight_tying=True, **options)
    out, ctx = case.merge(verify="full")
    assert HEAD + ".weight" not in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert ctx.facts["untied"] is False
    assert "logits_difference" in ctx.facts["verified"]
    expected = logits(case.reference(torch.float32))
    assert torch.allclose(logits(load(out, dtype=torch.float32)), expected, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_factors_that_came_apart_are_each_applied_to_their_own(make_case, dora):
    """On a bfloat16 base peft turns the shared factors into float32 one by one, and trains them on their own."""
    options = {"target_modules": ["q_proj", "embed_tokens"], "use_dora": dora}
    case = make_case("qwen3-tied", torch.bfloat16, ensure_weight_tying=True, **options)
    assert not torch.equal(update(case, HEAD), update(case, EMBEDDING))
    out, ctx = case.merge(verify="full")
    assert ctx.facts["untied"] is True
    assert "logits_difference" in ctx.facts["verified"]
    merged, base = load_file(out / "model.safetensors"), load_file(case.base / "model.safetensors")
    if not dora:
        for name in (HEAD, EMBEDDING):
            expected = base[f"{EMBEDDING}.weight"].double() + update(case, name)
            assert torch.equal(merged[f"{name}.weight"], expected.bfloat16())
    expected = logits(case.reference())  # in bfloat16 peft loads each its own
    assert (logits(load(out)) - expected).norm() < 0.05 * expected.norm()


def test_same_factors_of_another_scaling_are_two_weights(make_case):
    options = {"target_modules": ["q_proj", "embed_tokens"], "alpha_pattern": {"lm_head": 3}}
    case = make_case("qwen3-tied", ensure_weight_tying=True, **options)
    out, ctx = case.merge(verify="full")
    assert ctx.facts["untied"] is True
    expected = logits(case.reference(torch.float32))
    assert torch.allclose(logits(load(out, dtype=torch.float32)), expected, atol=1e-5 * float(expected.abs().max()))


def test_a_tied_pair_of_a_resized_vocabulary(make_case):
    case = make_case("qwen3-tied", ensure_weight_tying=True, target_modules=["q_proj", "embed_tokens"], resize=100)
    out, _ = case.merge(verify="spot")
    saved = load_file(case.adapter / "adapter_model.safetensors")
    merged = load_file(out / "model.safetensors")
    expected = saved[f"base_model.model.{EMBEDDING}.base_layer.weight"].double() + update(case, EMBEDDING)
    assert torch.equal(merged[f"{EMBEDDING}.weight"], expected.float())
    assert f"{HEAD}.weight" not in merged


def test_saved_modules_that_cannot_have_come_apart(make_case):
    case = make_case("qwen3-tied", ensure_weight_tying=True, target_modules=["q_proj"], modules_to_save=["lm_head"])
    path = case.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"base_model.model.{HEAD}.weight"] += 0.01
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelMergeError, match="trained as one") as caught:
        case.merge()
    assert caught.value.reason == "ADAPTER_CONFIG_INVALID"


def test_the_same_change_to_both_without_the_option_keeps_the_tie(make_case):
    case = make_case("qwen3-tied", target_modules=["q_proj", "embed_tokens", "lm_head"])
    path = case.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    head, embedding = f"base_model.model.{HEAD}.lora_", f"base_model.model.{EMBEDDING}.lora_embedding_"
    tensors[f"{head}A.weight"] = tensors[f"{embedding}B"].T.contiguous()
    tensors[f"{head}B.weight"] = tensors[f"{embedding}A"].T.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    _, ctx = case.merge(verify="full")
    assert ctx.facts["untied"] is False
