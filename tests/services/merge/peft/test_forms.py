"""Every form of adapter that people train, merged as peft merges it, but rounded once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from slipway.errors import ModelExportError
from support.models.merge_forms import FORMS, save_form, table
from support.models.merge_models import outputs

PAGE = Path(__file__).parents[4] / "docs/merging.md"


def by_hand(model: Any) -> dict[str, torch.Tensor]:
    """Weights of a model whose layers share one storage and have adapters of their own: peft cannot merge those."""
    state = copy.deepcopy(model.get_base_model()).state_dict()
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            state[f"{name}.weight"] = layer.get_base_layer().weight + layer.get_delta_weight("default")
    return {name: value for name, value in state.items() if ".lora_" not in name and ".base_layer." not in name}


def scale(weight: torch.Tensor) -> float:
    return max(weight.abs().max().item(), 1e-9)


#: Merged in bfloat16 too: whatever peft builds or merges with code of its own. Plain LoRA is in test_against_peft.py.
IN_16_BITS = ["adalora", "beft", "boft", "c3a", "deft", "delora", "fourierft", "frod", "glora", "gralora", "hira", "hra",
              "ia3 with biases", "ln_tuning", "loha", "lokr", "miss, bat", "oft", "osf", "peanut", "psoft", "pvera",
              "randlora, projections not saved", "road", "shira", "supertuning", "tinylora", "unilora", "vblora",
              "vera, projections not saved", "waveft",
              "bd-lora", "dora", "kasa", "lora on Conv2d", "lora_bias and bias=all", "monteclora", "olora", "pissa",
              "target_parameters", "trainable tokens alone"]  # fmt: skip


def variant(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Mark what repeats a form with another option or on another layer as slow."""
    return (pytest.mark.slow,) if ", " in name or " on " in name else ()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(name, torch.float32, id=f"{name}-fp32", marks=variant(name)) for name in FORMS),
        *(pytest.param(name, torch.bfloat16, id=f"{name}-bf16", marks=pytest.mark.slow) for name in IN_16_BITS),
    ],
)
def test_form(tmp_path, name, dtype):
    form = FORMS[name]
    case, cls = save_form(tmp_path, form, dtype)
    out, ctx = case.merge(verify="spot")  # the comparison below is the rest of the verification
    model, info = cls.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    tuned = peft.PeftModel.from_pretrained(cls.from_pretrained(case.base), case.adapter).eval()
    exact_model = copy.deepcopy(tuned).double()
    expected = outputs(exact_model, form.model)
    base = outputs(cls.from_pretrained(case.base).double(), form.model)
    theirs = None if form.alone else tuned.merge_and_unload().state_dict()
    exact = by_hand(exact_model) if form.alone else exact_model.merge_and_unload().state_dict()
    ours = model.state_dict()
    assert ours.keys() == exact.keys()
    for tensor, weight in ours.items():
        assert weight.dtype == dtype or not weight.is_floating_point()
        compare(tensor, weight, exact[tensor], None if theirs is None else theirs[tensor], dtype)
    change = (expected - base).abs().max()
    assert change > 1e-4 * scale(base), "the adapter must matter for this test to mean anything"
    if dtype == torch.float32:
        assert (outputs(model.double(), form.model) - expected).abs().max() < 1e-5 * scale(expected)
    assert ctx.facts["adapter_tensors"] == len(load_file(case.adapter / "adapter_model.safetensors"))


def compare(
    name: str, ours: torch.Tensor, exact: torch.Tensor, theirs: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """fp32 within 1e-6 of the weight's scale of peft and of the exact result; bf16 the exact result rounded once."""
    error = (ours.double() - exact.double()).abs()
    if dtype == torch.float32:
        assert error.max() <= 1e-6 * scale(exact), name
        if theirs is not None:
            assert (ours - theirs).abs().max() <= 1e-6 * scale(exact), name
        return
    nearest = (exact.to(dtype).double() - exact.double()).abs()
    assert (error <= nearest + 1e-6 * scale(exact)).all(), f"{name}: {(error - nearest).max():.3g} beyond one rounding"
    if theirs is not None:
        assert error.mean() <= (theirs.double() - exact.double()).abs().mean() * 1.001 + 1e-8 * scale(exact), name


def test_the_table_of_the_page_is_this_list():
    assert table() in PAGE.read_text(encoding="utf-8")
    assert len(FORMS) >= 30


def test_every_configuration_is_merged_in_16_bits_too():
    assert {FORMS[name].config for name in IN_16_BITS} == {form.config for form in FORMS.values()}


ACCOUNTED = ["lora", "dora", "loha", "vera", "unilora", "target_parameters", "lora on Conv2d", "trainable_token_indices",
             "bias=all", "ia3 with biases", "layer_replication", "shira"]  # fmt: skip


@pytest.mark.parametrize("damage", ["missing", "extra", "renamed", "reshaped"])
@pytest.mark.parametrize("name", ACCOUNTED)
def test_every_tensor_is_accounted_for(tmp_path, name, damage):
    """Nothing is merged if any tensor is missing, added, renamed or of another shape."""
    case, _ = save_form(tmp_path, FORMS[name], torch.float32)
    path = case.adapter / "adapter_model.safetensors"
    original = load_file(path)
    for place, key in enumerate(sorted(original)[:: max(1, len(original) // 2)]):
        tensors = dict(original)
        value = tensors[key]
        match damage:
            case "missing":
                del tensors[key]
            case "extra":
                tensors[swapped_layer(key)] = value.clone()
            case "renamed":
                tensors[swapped_layer(key)] = tensors.pop(key)
            case _:
                tensors[key] = torch.cat([value, value])
        save_file(tensors, path, metadata={"format": "pt"})
        case.workdir = tmp_path / f"work-{place}"
        case.workdir.mkdir()
        with pytest.raises(ModelExportError) as caught:
            case.merge()
        assert caught.value.reason in {
            "ADAPTER_TENSOR_UNUSED", "ADAPTER_BASE_MISMATCH", "CHECKPOINT_INCOMPLETE", "ADAPTER_CONFIG_INVALID",
            "ADAPTER_UNSUPPORTED",
        }  # fmt: skip
        assert not (case.workdir / "pytorch").exists()


def swapped_layer(key: str) -> str:
    """A name of the same kind for a module that is not there."""
    head, *rest = key.rsplit(".", 3)
    return ".".join([f"{head}_elsewhere", *rest])
