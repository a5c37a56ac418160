"""Incomplete, damaged and unsafe inputs have their reasons, and a full disk and a cancellation have theirs."""

from __future__ import annotations

import json

import pytest
import torch

from slipway.errors import CheckpointValidationError, ModelExportError
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from support.models import merge_forms
from support.models.merge_forms import save_form
from support.models.merge_refusals import Q0, edit_weights, refused


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
