"""Bases and adapters under the names that modules had before transformers moved them, and what a training run wraps names in.

Qwen2-VL's text layers were ``model.layers`` and are ``model.language_model.layers``; its files keep the old names. peft leaves out,
without an error, what an adapter has under names it does not know.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers as tf
from peft import PeftModel
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from support.models.merge_cases import SMALL, TOKENS, Case, save_case

SPECIAL = {"image_token_id": 95, "video_token_id": 94, "vision_start_token_id": 93, "vision_end_token_id": 92}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2}
NEW = [(r"^model\.(?!language_model|visual)", "model.language_model."), (r"^visual\.", "model.visual.")]
OLD = [(r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")]
ADAPTER = "base_model.model."


def vision_language_model() -> Any:
    torch.manual_seed(7)
    text = SMALL | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "tie_word_embeddings": True}
    config = tf.Qwen2VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=True, **SPECIAL)
    return tf.Qwen2VLForConditionalGeneration(config).eval()


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.double().eval()(input_ids=TOKENS % 90).logits


def rename(path, rules, start: str = "") -> None:
    def renamed(key: str) -> str:
        key = key.removeprefix(start)
        for pattern, new in rules:
            key = re.sub(pattern, new, key)
        return start + key

    save_file({renamed(key): value for key, value in load_file(path).items()}, path, metadata={"format": "pt"})


def make(folder, *, base: str, adapter: str, **lora: Any) -> tuple[Case, torch.Tensor]:
    """A case, and what its model computes, unmerged, by peft under the names of today."""
    case = save_case(folder, vision_language_model(), **lora)
    expected = outputs(PeftModel.from_pretrained(vision_language_model(), case.adapter))
    rename(case.base / "model.safetensors", OLD if base == "old" else NEW)
    if adapter == "old":
        rename(case.adapter / "adapter_model.safetensors", OLD, ADAPTER)
    return case, expected


def check(case: Case, expected: torch.Tensor, **params: Any) -> None:
    out, ctx = case.merge(**params)
    assert params["verify"] == "spot" or "logits_difference" in ctx.facts["verified"]
    merged, info = tf.Qwen2VLForConditionalGeneration.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (outputs(vision_language_model()) - expected).abs().max() > 1e-3
    assert torch.allclose(outputs(merged), expected, atol=1e-5 * float(expected.abs().max()))


FORMS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "qkv", "embed_tokens"], "alpha_pattern": {r"model\..*q_proj": 5}},
    "dora": {"target_modules": ["q_proj", "qkv"], "use_dora": True},
    "rows": {"target_modules": ["up_proj"], "trainable_token_indices": [1, 5]},
    "saved": {"target_modules": ["up_proj"], "modules_to_save": ["lm_head"]},
}


# Every form where their names differ; where they agree, one that is streamed and one that peft merges, with make test-all.
@pytest.mark.parametrize(
    ("form", "base", "adapter"),
    [
        *((form, *names) for form in FORMS for names in (("old", "new"), ("new", "old"))),
        pytest.param("lora", "new", "new", marks=pytest.mark.slow),
        pytest.param("dora", "old", "old", marks=pytest.mark.slow),
    ],
)
def test_whichever_names_either_has(tmp_path, form, base, adapter):
    case, expected = make(tmp_path, base=base, adapter=adapter, **FORMS[form])
    check(case, expected, verify="full")


def test_a_tie_is_found_under_old_names_without_a_load_of_the_model(tmp_path):
    """The embedding alone was trained: the output head that shares its weight stays as it was."""
    case, expected = make(tmp_path, base="old", adapter="old", target_modules=["embed_tokens"])
    check(case, expected, verify="spot")


@pytest.mark.parametrize("adapter", ["old", "new"])
@pytest.mark.parametrize("base", ["old", "new"])
def test_a_module_without_tensors_is_missed(tmp_path, base, adapter):
    case, _ = make(tmp_path, base=base, adapter=adapter, target_modules=["up_proj"])
    path = case.adapter / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if "layers.1." not in key}, path)
    with pytest.raises(ModelMergeError) as caught:
        case.merge(verify="spot")
    assert caught.value.reason == "CHECKPOINT_INCOMPLETE"
    assert "layers.1.mlp.up_proj" in caught.value.message


def test_patterns_of_old_names_that_peft_would_not_find_are_refused(tmp_path):
    case, _ = make(tmp_path, base="old", adapter="old", **FORMS["dora"] | {"alpha_pattern": {r"model\.layers\..*": 5}})
    with pytest.raises(ModelMergeError) as caught:
        case.merge()
    assert caught.value.reason == "ADAPTER_UNSUPPORTED"
    assert "alpha_pattern" in caught.value.message


def test_a_tensor_under_both_names_is_refused(tmp_path):
    case, _ = make(tmp_path, base="old", adapter="new", **FORMS["dora"])
    path = case.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    rename(path, OLD, ADAPTER)
    save_file(load_file(path) | {key: value + 1 for key, value in tensors.items()}, path)
    with pytest.raises(ModelMergeError) as caught:
        case.merge()
    assert caught.value.reason == "ADAPTER_TENSOR_UNUSED"
    assert "twice" in caught.value.message


WRAPPED = {
    "compiled-inside": lambda key: key.replace(ADAPTER, f"{ADAPTER}_orig_mod."),
    "compiled-outside": lambda key: f"_orig_mod.{key}",
    "data-parallel": lambda key: f"module.{key}",
    "not-peft": lambda key: key.removeprefix(ADAPTER),
}


def test_what_a_training_run_wraps_the_model_in(make_case):
    case = make_case("qwen3", target_modules=["q_proj"])
    plain, _ = case.merge(verify="full")
    path = case.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, wrap in WRAPPED.items():
        save_file({wrap(key): value for key, value in tensors.items()}, path, metadata={"format": "pt"})
        case.workdir = case.workdir.with_name(name)
        case.workdir.mkdir()
        wrapped, ctx = case.merge(verify="full")
        assert "logits_difference" in ctx.facts["verified"], name
        assert (wrapped / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes(), name
