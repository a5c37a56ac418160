"""A reader that knows only rank, alpha and names computes the same updates as peft does from the adapter as it was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from slipway.errors import AdapterExportError, ModelExportError
from slipway.stage import Context
from slipway_adapter.runtime import load
from slipway_merge.combine.stage import STAGE as COMBINE
from slipway_merge.params import CombineParams
from support.models.current_kinds import make_kind
from support.models.family_models import make_family_model
from support.models.merge_cases import logits
from support.models.saved_adapters import edit
from support.models.sentence_models import write_modules, write_prompts


def trained_updates(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(base), adapter)
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def served_updates(folder: Path) -> dict[str, torch.Tensor]:
    """Compute updates as a simple server does: one rank, one scaling, names as they stand."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert not config["rank_pattern"]
    assert not config["alpha_pattern"]
    assert not config["use_rslora"]
    assert isinstance(config["lora_alpha"], int)
    assert isinstance(config["target_modules"], list)
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for name in tensors:
        module, half, _ = name.removeprefix("base_model.model.").partition(".lora_A.weight")
        if not half:
            continue
        a, b = tensors[name].float(), tensors[name.replace("lora_A", "lora_B")].float()
        assert a.shape[0] == b.shape[1] == config["r"]
        found[module] = config["lora_alpha"] / config["r"] * b @ a
    assert 2 * len(found) == len(tensors)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, update in found.items():
        assert expected[name].abs().max() > 1e-4
        assert torch.allclose(update, expected[name], rtol=0, atol=tolerance * float(expected[name].abs().max())), name


PATTERNS: dict[str, Any] = {"rank_pattern": {"up_proj": 6}, "alpha_pattern": {"layers.0.*": 3}}
FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "rslora": ({"use_rslora": True}, False),
    "rslora with another rank": ({"use_rslora": True, "r": 5}, True),
    "patterns and rslora": ({**PATTERNS, "use_rslora": True}, True),
    "some layers": ({"layers_to_transform": [1]}, False),
    "an expression": ({"target_modules": r".*\.(q|v)_proj"}, False),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_update_is_the_trained_one(tune, deliver, bases, form):
    options, folded = FORMS[form]
    adapter = tune(**options)
    folder, ctx = deliver(bases("qwen3"), adapter)
    assert_same(served_updates(folder), trained_updates(bases("qwen3"), adapter))
    assert_same(trained_updates(bases("qwen3"), folder), trained_updates(bases("qwen3"), adapter))
    assert ctx.facts["scaling_folded"] is folded


def test_factors_that_need_no_change_keep_their_bits(tune, deliver, bases):
    adapter = tune(dtype=torch.bfloat16)
    folder, _ = deliver(bases("qwen3"), adapter)
    before, after = (load_file(path / "adapter_model.safetensors") for path in (adapter, folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in before)


def test_padding_is_exactly_zero(tune, deliver, bases):
    folder, _ = deliver(bases("qwen3"), tune(**PATTERNS))
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "q_proj" in name:
            beyond = tensor[4:] if "lora_A" in name else tensor[:, 4:]
            assert beyond.numel()
            assert not beyond.any()


@pytest.mark.parametrize(("dtype", "stored"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_scaling_is_not_rounded_into_16_bits_unless_asked_for(tune, deliver, bases, dtype, stored):
    adapter = tune(dtype=torch.bfloat16, use_rslora=True, r=5)
    folder, _ = deliver(bases("qwen3"), adapter, dtype=dtype)
    assert {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()} == {stored}
    assert_same(
        served_updates(folder), trained_updates(bases("qwen3"), adapter), tolerance=1e-6 if dtype == "auto" else 8e-3
    )


@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda name: name.replace("base_model.model.", "module.base_model.model."),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("base_model.model.", ""),
        lambda name: name.replace("base_model.model.model.", "base_model.model."),
        lambda name: name.replace("base_model.model.", "base_model.model.language_model."),
    ],
    ids=["compiled", "wrapped", "default", "bare", "shorter", "longer"],
)
def test_names_are_those_of_the_model(tune, deliver, bases, renamed):
    adapter = tune()
    expected = trained_updates(bases("qwen3"), adapter)
    edit(adapter, tensors=lambda tensors: {renamed(name): tensor for name, tensor in tensors.items()})
    folder, _ = deliver(bases("qwen3"), adapter)
    assert_same(served_updates(folder), expected)


def test_fused_layers_keep_their_names(tune, deliver, bases):
    adapter = tune("phi3", target_modules=["qkv_proj", "gate_up_proj"])
    folder, _ = deliver(bases("phi3"), adapter)
    assert_same(served_updates(folder), trained_updates(bases("phi3"), adapter))
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["gate_up_proj", "qkv_proj"]


def test_several_adapters_are_one_of_the_summed_rank(tune, deliver, bases, tmp_path):
    first, second = tune(name="first"), tune(name="second", r=8, use_rslora=True, target_modules=["q_proj"], seed=9)
    (tmp_path / "combined").mkdir()
    inputs = {"adapter": first, "adapter-02": second}
    combined = COMBINE.run(inputs, CombineParams(weights=(0.7, -0.4)), Context(workdir=tmp_path / "combined"))[
        "adapter"
    ]
    folder, _ = deliver(bases("qwen3"), combined)
    expected = {name: 0.7 * update for name, update in trained_updates(bases("qwen3"), first).items()}
    for name, update in trained_updates(bases("qwen3"), second).items():
        expected[name] = expected[name] - 0.4 * update
    assert_same(served_updates(folder), expected)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 12


def test_the_runtime_gives_the_trained_models_results(tune, deliver, bases):
    adapter = tune(**PATTERNS)
    folder, _ = deliver(bases("qwen3"), adapter)
    trained = PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(bases("qwen3")), adapter).eval()
    found = load(folder, bases("qwen3"), threads=1).module
    assert torch.allclose(logits(found), logits(trained), atol=1e-5)
    edit(
        folder, tensors=lambda tensors: {name.replace("q_proj", "nonesuch"): tensor for name, tensor in tensors.items()}
    )
    with pytest.raises(Exception, match="leaves out 4 tensors"):
        load(folder, bases("qwen3"), threads=1)


def test_a_module_that_holds_an_adapted_one_is_no_target(deliver, tmp_path):
    """In the encoder of images, ``q_proj`` holds the linear layer; peft would take it for one of the text's layers."""
    kind = make_kind("gemma4-vision", tmp_path / "kind")
    folder, _ = deliver(kind.base, kind.adapter)
    found = load(folder, kind.base, threads=1).module
    names = {name for name, module in found.named_modules() if "lora_A" in dict(module.named_children())}
    assert any(name.endswith("q_proj.linear") for name in names)
    assert len(names) * 2 == len(load_file(kind.adapter / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda name, tensor: {name.replace("layers.1", "layers.7"): tensor}, "ADAPTER_TENSOR_UNUSED"),
        (lambda name, tensor: {name: tensor[:, :-1] if "lora_A" in name else tensor}, "ADAPTER_BASE_MISMATCH"),
        (lambda name, tensor: {name: tensor * float("nan")}, "NON_FINITE_WEIGHTS"),
        (lambda name, tensor: {} if "lora_A" in name else {name: tensor}, "CHECKPOINT_INCOMPLETE"),
        (lambda name, tensor: {name: tensor * 0}, "ADAPTER_NOT_SERVABLE"),
    ],
    ids=["layer", "shape", "nan", "half", "zero"],
)
def test_what_does_not_fit_is_refused(tune, deliver, bases, change, reason):
    adapter = tune()
    edit(
        adapter,
        tensors=lambda tensors: {
            key: value.contiguous() for name, tensor in tensors.items() for key, value in change(name, tensor).items()
        },
    )
    with pytest.raises(ModelExportError) as caught:
        deliver(bases("qwen3"), adapter)
    assert caught.value.reason == reason


def test_values_beyond_float16_are_refused(tune, deliver, bases):
    adapter = tune()
    edit(adapter, tensors=lambda tensors: {name: tensor * 1e6 for name, tensor in tensors.items()})
    with pytest.raises(AdapterExportError, match="beyond F16"):
        deliver(bases("qwen3"), adapter, dtype="float16")


def test_a_sentence_encoders_adapter_has_pooling_and_prompts(tmp_path: Path, deliver: Any) -> None:
    base = make_family_model("bert-features", tmp_path / "base")
    write_prompts(write_modules(base, normalized=True), {"query": "q: "})
    adapter = tmp_path / "adapter"
    config = LoraConfig(r=2, target_modules=["query"], init_lora_weights=False, task_type="FEATURE_EXTRACTION")
    get_peft_model(tf.AutoModel.from_pretrained(base), config).save_pretrained(adapter)
    folder, _ = deliver(base, adapter)
    names = ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json")
    assert all((folder / name).read_bytes() == (base / name).read_bytes() for name in names)
    edit(adapter, task_type="SEQ_CLS")
    folder, _ = deliver(base, adapter, name="classifier")
    assert not (folder / "modules.json").exists()
