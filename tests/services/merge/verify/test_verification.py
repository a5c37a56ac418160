"""A written merge is looked at again: a single wrong tensor is found by its name, by rows and by a load of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from slipway.stage import Context
from slipway_merge import merge as merge_module
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from slipway_merge.verify.spot_check import spot_check
from support.models.merge_cases import SMALL, save_case
from support.models.tiny_models import describe_a_layer_more, make_base, make_checkpoint

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def damage(monkeypatch, change) -> None:
    """Let something change a written tensor between the write and the checks, as a faulty disk might."""
    name = "model.layers.1.mlp.up_proj.weight"

    def spot_check_after(folder, layout, reader, **options):
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = change(tensors[name], tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return spot_check(folder, layout, reader, **options)

    monkeypatch.setattr(merge_module, "spot_check", spot_check_after)


def refused(case, **params) -> ModelMergeError:
    with pytest.raises(ModelMergeError) as caught:
        case.merge(**params)
    assert caught.value.reason == "MERGE_NOT_VERIFIED"
    return caught.value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_what_was_checked_is_reported(make_case, kind, dtype):
    case = make_case(kind, dtype, fan_in_fan_out=kind == "gpt2")
    _, ctx = case.merge(verify="full")
    verified = ctx.facts["verified"]
    assert verified["modules_computed"] == ctx.facts["tensors_merged"]
    assert 0 < verified["largest_error_of_tolerance"] < 1
    assert verified["loaded"] is True
    assert verified["logits_difference"] < verified["logits_change"] / (1000 if dtype == torch.float32 else 3)
    assert verified["logits_tolerance"] < verified["logits_change"] / (1000 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        lambda weight, _: weight * 1.01,
        lambda weight, _: weight.roll(1, 0),
        lambda _, tensors: tensors["model.layers.0.mlp.up_proj.weight"].clone(),
    ],
    ids=["scaled", "rolled", "another layer's"],
)
def test_a_wrong_tensor_is_named(make_case, monkeypatch, dtype, change):
    case = make_case("qwen3", dtype)
    damage(monkeypatch, change)
    error = refused(case, verify="spot")
    assert error.about["tensor"] == "model.layers.1.mlp.up_proj.weight"
    assert "on a random input" in error.message


@pytest.mark.parametrize("what", ["missing", "additional", "type"])
def test_files_hold_exactly_what_was_planned(make_case, monkeypatch, what):
    case = make_case("qwen3")

    def change(weight, tensors):
        if what == "missing":
            del tensors["model.norm.weight"]
        elif what == "additional":
            tensors["stray"] = torch.ones(1)
        return weight.half() if what == "type" else weight

    damage(monkeypatch, change)
    error = refused(case, verify="spot")
    expected = {"missing": "model.norm.weight", "additional": "stray", "type": "model.layers.1.mlp.up_proj.weight"}
    assert error.about["tensor"] == expected[what]


def test_a_base_that_lacks_a_weight_is_found_by_the_load(make_case):
    """Only the index, which this model does not have, could show it."""
    case = make_case("qwen3", target_modules=["q_proj"])
    weights = load_file(case.base / "model.safetensors")
    del weights["model.layers.0.mlp.gate_proj.weight"]
    save_file(weights, case.base / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.0.mlp.gate_proj.weight" in refused(case).message
    case.workdir = case.workdir / "again"
    case.workdir.mkdir()
    case.merge(verify="spot")


def damage_after_the_spot_check(monkeypatch, name, change) -> None:
    real = merge_module.spot_check

    def after(folder, layout, reader, **options):
        found = real(folder, layout, reader, **options)
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = change(tensors[name])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return found

    monkeypatch.setattr(merge_module, "spot_check", after)


def test_logits_of_another_model_are_refused(make_case, monkeypatch):
    damage_after_the_spot_check(monkeypatch, "model.embed_tokens.weight", lambda weight: weight.roll(1, 0))
    assert "logits" in refused(make_case("qwen3"), verify="full").message


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_off_by_a_few_per_cent_are_refused(make_case, monkeypatch, dtype):
    damage_after_the_spot_check(monkeypatch, "model.norm.weight", lambda weight: weight * 1.05)
    assert "logits" in refused(make_case("qwen3", dtype), verify="full").message


@pytest.mark.parametrize("convert", ["bfloat16", "float16", "float32"])
def test_all_weights_of_a_converted_model_may_have_been_rounded(make_case, convert):
    case = make_case("llama", torch.float16 if convert == "bfloat16" else torch.bfloat16, target_modules=["q_proj"])
    verified = case.merge(verify="full", dtype=convert)[1].facts["verified"]
    assert verified["logits_difference"] <= verified["logits_tolerance"]


def test_a_comparison_that_peft_cannot_make_is_warned_of(make_case):
    """The task says nothing about the weights, so the merge is right; peft refuses one that it does not know."""
    case = make_case("qwen3", target_modules=["q_proj"])
    path = case.adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_type": "TASK_OF_TOMORROW"}))
    _, ctx = case.merge(verify="full")
    assert ctx.facts["verified"]["loaded"] is True
    assert "not compared" in ctx.facts["verified"]["logits"]
    [warning] = ctx.facts["warnings"]
    assert "not compared" in warning
    assert "TASK_OF_TOMORROW" in warning


def test_the_spot_check_needs_no_torch(make_case, tmp_path):
    case = make_case("qwen3", torch.bfloat16)
    code = (
        "import sys, json; from pathlib import Path; from slipway.stage import Context; "
        "from slipway_merge.stage import STAGE, MergeParams; "
        f"STAGE.run({{'base': Path({str(case.base)!r}), 'adapter': Path({str(case.adapter)!r})}}, "
        f"MergeParams(verify='spot'), Context(workdir=Path({str(case.workdir)!r}))); "
        "print(json.dumps(sorted(name for name in ('torch', 'transformers', 'peft') if name in sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_a_model_that_takes_more_than_tokens_is_loaded_and_not_compared(tmp_path):
    """CLIP has two embeddings; a router that wants more experts than there are fails in its own code."""
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    clip = tf.CLIPConfig(
        text_config={**size, "vocab_size": 96}, vision_config={**size, "image_size": 32, "patch_size": 8}
    )
    experts = tf.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=8, moe_intermediate_size=16, head_dim=8)
    for model in (tf.CLIPModel(clip), tf.Qwen3MoeForCausalLM(experts)):
        folder = tmp_path / type(model).__name__
        _, ctx = save_case(folder, model, target_modules=["q_proj"]).merge(verify="full")
        assert ctx.facts["verified"]["loaded"] is True
        assert "not compared" in ctx.facts["verified"]["logits"]


@pytest.mark.parametrize("verify", ["auto", "spot", "full"])
def test_modes(make_case, verify):
    case = make_case("llama", target_modules=["q_proj"])
    ctx = Context(workdir=case.workdir)
    STAGE.run({"base": case.base, "adapter": case.adapter}, MergeParams(verify=verify), ctx)
    assert ("loaded" in ctx.facts["verified"]) is (verify != "spot")
    assert Path(case.workdir, "pytorch/model.safetensors").is_file()


def test_a_base_that_describes_much_more_than_it_has_is_not_loaded(tmp_path):
    base = make_base(tmp_path / "base")
    adapter = make_checkpoint(base, tmp_path / "run")
    describe_a_layer_more(base)
    with pytest.raises(ModelMergeError, match="describes a model of") as caught:
        STAGE.run({"base": base, "adapter": adapter}, MergeParams(), Context(workdir=tmp_path))
    assert caught.value.reason == "MERGE_NOT_VERIFIED"
