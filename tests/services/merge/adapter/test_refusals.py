"""What cannot be merged exactly is refused by name, with its documented reason, and nothing is left behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from slipway.errors import ModelMergeError
from support.models import merge_forms
from support.models.merge_forms import save_form
from support.models.merge_refusals import edit_config, edit_weights, refused

UNSUPPORTED: list[dict[str, Any]] = [
    {"init_lora_weights": "pissa_niter_4"},
    {"init_lora_weights": "loftq"},
    {"init_lora_weights": "corda"},
    {"init_lora_weights": "lora_ga"},
    {"init_lora_weights": "an_init_of_tomorrow"},
    {"an_option_of_tomorrow": True},
]


@pytest.mark.parametrize("option", UNSUPPORTED, ids=lambda option: "-".join(map(str, next(iter(option.items())))))
def test_unsupported_option_is_named(make_case, option):
    case = make_case("llama", target_modules=["q_proj"])
    edit_config(case, **option)
    (key,) = option
    error = refused(case, "ADAPTER_UNSUPPORTED", key)
    assert error.about["key"] == key
    assert not (case.workdir / "pytorch").exists()


@pytest.mark.parametrize("init", ["pissa_niter_4", "loftq", "corda", "lora_ga"])
def test_a_base_that_training_changed_is_not_left_to_peft(make_case, init):
    """peft loads such an adapter onto the base as it was, and merges something else than was trained."""
    case = make_case("llama", target_modules=["q_proj"])
    edit_config(case, init_lora_weights=init)
    error = refused(case, "ADAPTER_UNSUPPORTED", init, "path_initial_model_for_weight_conversion")
    assert error.remedy.startswith("in the training process")


#: Options that a plain adapter's weights contradict, with what is said then.
CONTRADICTED: list[tuple[dict[str, Any], str, str]] = [
    ({"use_dora": True}, "CHECKPOINT_INCOMPLETE", "lora_magnitude_vector"),
    ({"lora_bias": True}, "CHECKPOINT_INCOMPLETE", "lora_B.bias"),
    ({"trainable_token_indices": [1, 2]}, "CHECKPOINT_INCOMPLETE", "token ids"),
    ({"trainable_token_indices": [1, 1]}, "ADAPTER_CONFIG_INVALID", "once"),
    ({"layer_replication": [[0, 2], [0, 2]]}, "CHECKPOINT_INCOMPLETE", "layers.2.self_attn.q_proj"),
    ({"layer_replication": [[0, 9]]}, "ADAPTER_BASE_MISMATCH", "layer 2"),
    ({"layer_replication": [[2, 0]]}, "ADAPTER_CONFIG_INVALID", "layer_replication"),
    ({"alora_invocation_tokens": [5]}, "ADAPTER_UNSUPPORTED", "aLoRA"),
    ({"megatron_config": {"tp": 2}}, "ADAPTER_UNSUPPORTED", "egatron"),
]


@pytest.mark.parametrize(
    ("option", "reason", "word"), CONTRADICTED, ids=lambda value: "-".join(value) if isinstance(value, dict) else None
)
def test_options_that_the_weights_contradict(make_case, option, reason, word):
    case = make_case("llama", target_modules=["q_proj"])
    edit_config(case, **option)
    refused(case, reason, word)
    assert not (case.workdir / "pytorch").exists()


def test_stack_of_experts_that_is_not_there(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    edit_config(case, target_parameters=["input_layernorm.weight"])
    refused(case, "CHECKPOINT_INCOMPLETE", "layers.0.input_layernorm.weight")


def test_unknown_but_unset_options_are_fine(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    edit_config(case, an_option_of_tomorrow=None, another=False, third=[])
    case.merge()


@pytest.mark.parametrize(
    "peft_type",
    ["PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE", "ADAPTION_PROMPT", "XLORA",
     "POLY"],
)  # fmt: skip
def test_forms_that_change_no_weight(make_case, peft_type):
    case = make_case("llama", target_modules=["q_proj"])
    edit_config(case, peft_type=peft_type)
    error = refused(case, "ADAPTER_UNSUPPORTED", peft_type, "no weight that could be written")
    assert "beside it" in error.remedy


def test_a_type_of_tomorrow(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    edit_config(case, peft_type="OF_TOMORROW")
    refused(case, "ADAPTER_UNSUPPORTED", "OF_TOMORROW")


@pytest.mark.parametrize(("form", "word"), [(merge_forms.form("llama", "LilyConfig", "q_proj"), "Lily"),
    (merge_forms.form("llama", "ShadowConfig", "q_proj"), "input-dependent"),
    (merge_forms.form("llama", "BeftConfig", "q_proj"), "no bias"),
    (merge_forms.form("resnet", "OFTConfig", "layer.0.convolution", r=0, oft_block_size=4), "not what was trained")],
    ids=["lily", "shadow", "beft-without-bias", "oft-conv2d"],
)  # fmt: skip
def test_what_peft_cannot_merge_or_merges_wrongly(tmp_path, form, word):
    """In peft 0.21 the merge of OFT on convolutions gives another model than the one that was trained."""
    case, _ = save_form(tmp_path, form, torch.float32)
    refused(case, "ADAPTER_UNSUPPORTED", word)
    assert not (case.workdir / "pytorch").exists()


def test_a_form_with_an_option_of_tomorrow(tmp_path):
    case, _ = save_form(tmp_path, merge_forms.FORMS["loha"], torch.float32)
    edit_config(case, an_option_of_tomorrow=3)
    refused(case, "ADAPTER_UNSUPPORTED", "an_option_of_tomorrow")


@pytest.mark.parametrize(
    "change",
    [{"r": 0}, {"r": "4"}, {"r": True}, {"lora_alpha": None}, {"lora_alpha": float("nan")}, {"rank_pattern": {"q(": 4}},
     {"rank_pattern": {"q": 0}}, {"alpha_pattern": [1]}, {"use_rslora": 1}, {"modules_to_save": "lm_head"},
     {"target_modules": "(", "layers_to_transform": None}],
)  # fmt: skip
def test_impossible_values(make_case, change):
    case = make_case("llama", target_modules=["q_proj"])
    edit_config(case, **change)
    refused(case, "ADAPTER_CONFIG_INVALID", next(iter(change)))


def test_rank_must_be_that_of_the_tensors(make_case):
    """A wrong rank would scale the update wrongly without anybody noticing."""
    case = make_case("llama", target_modules=["q_proj"])
    edit_config(case, r=8)
    refused(case, "ADAPTER_CONFIG_INVALID", "rank 8", "lora_A", "(4, 32)")


def test_dora_tensors_without_the_flag(make_case):
    case = make_case("llama", target_modules=["q_proj"], use_dora=True)
    edit_config(case, use_dora=False)
    refused(case, "ADAPTER_TENSOR_UNUSED", "lora_magnitude_vector")


def test_adapter_for_another_width(make_case, tmp_path):
    """Same names, other shapes: the tensor and both shapes are named."""
    case = make_case("llama", target_modules=["q_proj"])

    def widen(tensors):
        return {key: torch.cat([t, t], dim=1) if "lora_A" in key else t for key, t in tensors.items()}

    edit_weights(case.adapter, widen)
    error = refused(case, "ADAPTER_BASE_MISMATCH", "q_proj.lora_A.weight", "(4, 64)", "(32, 32)")
    assert error.about["tensor"].endswith("lora_A.weight")


def test_transposed_shapes_are_not_guessed(make_case):
    """A linear base whose weight happens to have the adapter's shape turned round is another model, not a Conv1D."""
    case = make_case("llama", target_modules=["up_proj"])
    edit_config(case, target_modules=["down_proj"])
    edit_weights(case.adapter, lambda t: {key.replace("up_proj", "down_proj"): value for key, value in t.items()})
    refused(case, "ADAPTER_BASE_MISMATCH", "down_proj")


def test_adapter_for_more_layers(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    edit_weights(case.adapter, lambda t: {**t, **{k.replace("layers.0", "layers.9"): v.clone() for k, v in t.items()}})
    error = refused(case, "ADAPTER_TENSOR_UNUSED", "layers.9.self_attn.q_proj.lora_A", "2 tensors")
    assert isinstance(error, ModelMergeError)


def test_adapter_for_another_architecture(make_case, tmp_path):
    case = make_case("llama", target_modules=["q_proj"])
    (tmp_path / "other").mkdir()
    other = make_case.func(tmp_path / "other", "gpt2", fan_in_fan_out=True)
    case.base = other.base
    refused(case, "ADAPTER_TENSOR_UNUSED", "q_proj")


def test_resized_embedding_that_was_not_saved(make_case):
    """Half of the resized weights missing: the model that is written could not be loaded."""
    case = make_case("qwen3", resize=101, target_modules=["q_proj"])
    edit_weights(case.adapter, lambda t: {key: value for key, value in t.items() if "lm_head" not in key})
    refused(case, "ADAPTER_BASE_MISMATCH", "lm_head", "101")


def test_tokenizer_knows_more_than_the_embedding(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 96, "content": "<new>"}]}
    (case.adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(case, "ADAPTER_BASE_MISMATCH", "96", "embeddings")


def test_weight_tying_of_adapters(make_case):
    case = make_case("qwen3-tied", target_modules=["q_proj", "embed_tokens"])
    edit_config(case, ensure_weight_tying=True)
    refused(case, "CHECKPOINT_INCOMPLETE", "ensure_weight_tying", "lm_head.weight")


def test_a_base_whose_class_has_to_be_asked_names_it(make_case):
    case = make_case("qwen3-tied", target_modules=["embed_tokens"])
    path = case.base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": None}))
    refused(case, "ADAPTER_UNSUPPORTED", "which weights are tied", "names no class")


def test_what_the_class_has_to_be_asked_for_is_named(make_case):
    case = make_case("llama", target_modules=["q_proj"], use_dora=True)
    path = case.base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": None}))
    refused(case, "ADAPTER_UNSUPPORTED", "which layers the adapter is for", "names no class")
