"""What cannot be merged exactly is refused by name, with its documented reason, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import CheckpointValidationError, ModelExportError, ModelMergeError
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from support.models import merge_forms
from support.models.merge_cases import Case
from support.models.merge_forms import save_form

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def edit_config(case: Case, **changes: Any) -> None:
    path = case.adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Any, name: str = "adapter_model.safetensors") -> None:
    tensors = load_file(folder / name)
    save_file(change(tensors), folder / name, metadata={"format": "pt"})


def refused(case: Case, reason: str, *words: str, **params: Any) -> ModelExportError:
    before = {path: path.read_bytes() for folder in (case.base, case.adapter) for path in folder.iterdir()}
    with pytest.raises(ModelExportError) as caught:
        case.merge(**params)
    assert caught.value.reason == reason
    for word in words:
        assert word in str(caught.value)
    after = {path: path.read_bytes() for folder in (case.base, case.adapter) for path in folder.iterdir()}
    assert after == before
    return caught.value


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
    error = refused(case, "ADAPTER_UNSUPPORTED", peft_type, "changes no weight")
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


@pytest.mark.parametrize("where", ["adapter", "base"])
def test_non_finite_weights_of_a_form(tmp_path, where):
    case, _ = save_form(tmp_path, merge_forms.FORMS["dora"], torch.float32)
    folder, name, tensor = {
        "adapter": (case.adapter, "adapter_model.safetensors", f"{Q0}.lora_magnitude_vector"),
        "base": (case.base, "model.safetensors", "model.layers.1.self_attn.q_proj.weight"),
    }[where]

    def spoil(tensors):
        tensors[tensor].view(-1)[3] = float("nan")
        return tensors

    edit_weights(folder, spoil, name)
    refused(case, "NON_FINITE_WEIGHTS", tensor)


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


@pytest.mark.parametrize("which", ["lora_A", "lora_B"])
def test_half_a_pair(make_case, which):
    case = make_case("llama", target_modules=["q_proj"])
    edit_weights(case.adapter, lambda t: {key: value for key, value in t.items() if f"{Q0}.{which}" not in key})
    refused(case, "CHECKPOINT_INCOMPLETE", "no partner", which)


@pytest.mark.parametrize("targets", [["q_proj"], r".*q_proj"])
def test_missing_pair(make_case, targets):
    """A whole pair gone would leave one module silently untrained."""
    case = make_case("llama", target_modules=targets)
    edit_weights(case.adapter, lambda t: {key: value for key, value in t.items() if Q0 not in key})
    refused(case, "CHECKPOINT_INCOMPLETE", "layers.0.self_attn.q_proj")


def test_missing_module_to_save(make_case):
    case = make_case("qwen3", target_modules=["q_proj"], modules_to_save=["lm_head"])
    edit_weights(case.adapter, lambda t: {key: value for key, value in t.items() if "lm_head" not in key})
    refused(case, "CHECKPOINT_INCOMPLETE", "lm_head")


def test_untrained_adapter(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    edit_weights(case.adapter, lambda t: {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in t.items()})
    refused(case, "ADAPTER_NO_EFFECT", "zero")
    assert not (case.workdir / "pytorch").exists()


def test_untrained_adapter_with_unchanged_saved_module(make_case):
    case = make_case("qwen3", target_modules=["q_proj"], modules_to_save=["lm_head"])
    head = load_file(case.base / "model.safetensors")["lm_head.weight"]
    edit_weights(
        case.adapter,
        lambda t: {
            k: torch.zeros_like(v) if "lora_B" in k else head.clone() if "lm_head" in k else v for k, v in t.items()
        },
    )
    refused(case, "ADAPTER_NO_EFFECT")


def test_untrained_adapter_with_a_copy_of_the_tied_weight(make_case):
    """A head of its own would be written, with the values it shares in the base."""
    case = make_case("qwen3-tied", target_modules=["embed_tokens"], modules_to_save=["lm_head"])
    shared = load_file(case.base / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(
        case.adapter,
        lambda t: {
            k: torch.zeros_like(v) if "lora_embedding_B" in k else shared.clone() if "lm_head" in k else v
            for k, v in t.items()
        },
    )
    refused(case, "ADAPTER_NO_EFFECT", "zero")


def test_untrained_adapter_with_copies_of_repeated_layers(make_case):
    case = make_case(
        "llama", target_modules=["q_proj"], modules_to_save=["input_layernorm"], layer_replication=[[0, 2], [0, 1]]
    )
    base = load_file(case.base / "model.safetensors")

    def untrained(tensors):
        norms = {
            key: base[f"model.layers.{layer % 2}.input_layernorm.weight"].clone()
            for layer in range(3)
            for key in tensors
            if f".layers.{layer}.input_layernorm" in key
        }
        assert len(norms) == 3
        return {k: torch.zeros_like(v) if "lora_B" in k else norms.get(k, v) for k, v in tensors.items()}

    edit_weights(case.adapter, untrained)
    refused(case, "ADAPTER_NO_EFFECT", "zero")


def away_from_zero(tensors):
    """Weights near zero have finer steps, where even a tiny update shows."""
    return {key: torch.where(t.abs() < 0.02, torch.full_like(t, 0.02), t) for key, t in tensors.items()}


def test_update_lost_in_rounding(make_case):
    """In bfloat16 a change of one part in a million changes nothing; in float32 it does."""
    case = make_case("llama", torch.bfloat16, target_modules=["q_proj"])
    edit_weights(case.base, away_from_zero, "model.safetensors")
    edit_weights(case.adapter, lambda t: {key: value * (1e-5 if "lora_B" in key else 1) for key, value in t.items()})
    refused(case, "ADAPTER_NO_EFFECT", "rounding", "float32")
    case.workdir = case.workdir / "again"
    case.workdir.mkdir()
    _, ctx = case.merge(dtype="float32")
    assert ctx.facts["unchanged_share"] < 0.1


def test_module_lost_in_rounding_is_named(make_case):
    case = make_case("llama", torch.bfloat16, target_modules=["q_proj"])
    edit_weights(case.base, away_from_zero, "model.safetensors")
    edit_weights(case.adapter, lambda t: {k: v * 1e-5 if f"{Q0}.lora_B" in k else v for k, v in t.items()})
    _, ctx = case.merge()
    assert any("layers.0.self_attn.q_proj" in warning for warning in ctx.facts["warnings"])
    shares = {module["module"]: module["unchanged_share"] for module in ctx.facts["modules"]}
    assert shares["model.layers.0.self_attn.q_proj"] == 1.0
    assert shares["model.layers.1.self_attn.q_proj"] < 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["adapter", "base-merged", "base-copied", "module-to-save"])
def test_non_finite_weights_are_named(make_case, where, value):
    case = make_case("qwen3", target_modules=["q_proj"], modules_to_save=["lm_head"])
    folder, name, tensor = {
        "adapter": (case.adapter, "adapter_model.safetensors", f"{Q0}.lora_B.weight"),
        "base-merged": (case.base, "model.safetensors", "model.layers.1.self_attn.q_proj.weight"),
        "base-copied": (case.base, "model.safetensors", "model.layers.1.mlp.up_proj.weight"),
        "module-to-save": (case.adapter, "adapter_model.safetensors", "base_model.model.lm_head.weight"),
    }[where]

    def spoil(tensors):
        tensors[tensor].view(-1)[5] = value
        return tensors

    edit_weights(folder, spoil, name)
    refused(case, "NON_FINITE_WEIGHTS", tensor)


def test_overflow_of_the_result(make_case):
    case = make_case("llama", torch.float16, target_modules=["q_proj"])
    edit_weights(case.adapter, lambda t: {k: v.float() * (1e6 if "lora_B" in k else 1) for k, v in t.items()})
    refused(case, "NON_FINITE_WEIGHTS", "q_proj", "bfloat16")


@pytest.mark.parametrize("folder", ["base", "adapter"])
@pytest.mark.parametrize("keep", [0, 7, 300, -1])
def test_truncated_weights(make_case, folder, keep):
    case = make_case("llama", target_modules=["q_proj"])
    path = getattr(case, folder) / ("model.safetensors" if folder == "base" else "adapter_model.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    error = refused(case, "SAFETENSORS_CORRUPT", path.name)
    assert isinstance(error, CheckpointValidationError)


def test_missing_shard(make_case):
    case = make_case("llama", shard="12KB", target_modules=["q_proj"])
    gone = sorted(case.base.glob("model-*.safetensors"))[1]
    gone.unlink()
    refused(case, "BASE_MODEL_INVALID", gone.name)


def test_missing_adapter_config(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    (case.adapter / "adapter_config.json").unlink()
    refused(case, "ADAPTER_CONFIG_MISSING")


def test_pickles_are_never_opened(make_case, tmp_path):
    case = make_case("llama", target_modules=["q_proj"])
    (case.adapter / "adapter_model.safetensors").unlink()
    (case.adapter / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch %s/ran'\ntR." % str(tmp_path).encode())
    refused(case, "UNSAFE_PICKLE")
    assert not (tmp_path / "ran").exists()


def test_quantized_base(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    path = case.base / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "bitsandbytes"}})
    )
    refused(case, "DTYPE_UNSUPPORTED", "bitsandbytes")


def test_unmergeable_dtype_is_named(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_weights(case.base, lambda t: {**t, name: t[name].to(torch.float8_e4m3fn)}, "model.safetensors")
    refused(case, "DTYPE_UNSUPPORTED", name, "F8_E4M3")


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


def test_disk_full(make_case, small_disk):
    case = make_case("llama", target_modules=["q_proj"])
    (small_disk / "filler").write_bytes(b"x" * (8 * 1024 * 1024 - 60_000))
    case.workdir = small_disk / "work"
    case.workdir.mkdir()
    refused(case, "DISK_FULL", "space")


def test_cancelled(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    ctx = Context(workdir=case.workdir)
    ctx.on_progress = lambda progress: ctx.cancelled.set()
    with pytest.raises(ModelExportError) as caught:
        STAGE.run({"base": case.base, "adapter": case.adapter}, MergeParams(), ctx)
    assert caught.value.reason == "CANCELLED"


def test_a_base_whose_class_has_to_be_asked_names_it(make_case):
    case = make_case("qwen3-tied", target_modules=["embed_tokens"])
    path = case.base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": None}))
    refused(case, "ADAPTER_UNSUPPORTED", "which weights are tied", "names no class")
