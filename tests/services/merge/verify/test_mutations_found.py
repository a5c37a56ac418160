"""Mutations that once were more than a refusal or a merge: found by more seeds than the suite runs each time."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from slipway.errors import ModelMergeError
from support.models.merge_forms import FORMS, save_form


@pytest.mark.parametrize("value", [2.5, [], "", "x", [None], {"a": 1}, ["PreTrainedModel"]], ids=repr)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_base_that_names_no_class(make_case, kind, value):
    """Refuse the adapter if the model must be asked; otherwise merge, and report that the result was not loaded."""
    case = make_case(kind, target_modules=["c_attn"] if kind == "gpt2" else ["q_proj"], fan_in_fan_out=kind == "gpt2")
    path = case.base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": value}))
    try:
        _, ctx = case.merge(verify="full")
    except ModelMergeError as error:
        assert error.reason in {"ADAPTER_UNSUPPORTED", "MERGE_NOT_VERIFIED"}
    else:
        assert "not checked" in ctx.facts["verified"]["loaded"]
    assert "_can_set_experts_implementation_cached_value" not in vars(PreTrainedModel)  # all models would inherit it


@pytest.mark.parametrize("name", ["dora", "dora on Conv1D"])
def test_factors_beyond_what_float32_can_square(tmp_path, name):
    """After a diverged training the layer computes zeros or NaN in float32, whatever its exact weight is."""
    case, _ = save_form(tmp_path, FORMS[name], torch.float32)
    path = case.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    factor = [key for key in sorted(tensors) if key.endswith("lora_A.weight")][-1]
    tensors[factor][0, 3] = 5e36
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelMergeError) as caught:
        case.merge(verify="spot")
    assert caught.value.reason in {"MERGE_NOT_VERIFIED", "NON_FINITE_WEIGHTS", "ADAPTER_UNSUPPORTED"}
