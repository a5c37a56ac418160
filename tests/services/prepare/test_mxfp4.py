"""gpt-oss as it is published: experts in MXFP4."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slipway.model.base_format import base_format
from slipway.model.folder import ModelFolder
from slipway_prepare.mxfp4_format import dequantize
from support.models.current_kinds import make_kind
from support.models.prepare_models import configure, refusal, run

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def packed(tmp_path):
    """The folder of a model with packed experts."""
    return make_kind("gpt-oss-mxfp4", tmp_path / "kind", dtype=torch.bfloat16).base


def test_every_code_with_every_scale_is_bit_for_bit_what_transformers_makes_of_it():
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1).expand(1, 255, 16).contiguous()
    expected = convert_moe_packed_tensors(codes, scales, dtype=torch.bfloat16)
    ours = dequantize(codes[0], scales[0]).bfloat16().T.contiguous()
    assert torch.equal(ours.view(torch.int16), expected[0].view(torch.int16))


def test_a_scale_that_is_no_number_makes_none():
    values = dequantize(torch.zeros(1, 2, 16, dtype=torch.uint8), torch.tensor([[255, 127]], dtype=torch.uint8))
    assert values.isnan().sum() == 32


def test_a_whole_model_is_what_transformers_loads(packed, tmp_path):
    assert base_format(ModelFolder.open(packed)) == "mxfp4"
    out, tensors, facts = run(packed, tmp_path)
    stored = load_file(packed / "model.safetensors")
    assert facts["method"] == "mxfp4"
    assert facts["computed"] == 4
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    for name in ("gate_up_proj", "down_proj"):
        parts = (stored[f"{EXPERTS}.{name}_blocks"], stored[f"{EXPERTS}.{name}_scales"])
        expected = convert_moe_packed_tensors(*parts, dtype=torch.bfloat16)
        assert torch.equal(tensors[f"{EXPERTS}.{name}"].view(torch.int16), expected.view(torch.int16))
    theirs = tf.AutoModelForCausalLM.from_pretrained(
        packed, dtype=torch.bfloat16, quantization_config=tf.Mxfp4Config(dequantize=True)
    )
    ours = tf.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name


def pop_all(tensors, end):
    """Take away a part of the stacks of all layers."""
    for name in [name for name in tensors if name.endswith(end)]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "reason", "said"),
    [
        (lambda tensors: tensors.pop(f"{EXPERTS}.down_proj_scales"), "BASE_MODEL_INVALID", "lacks"),
        (lambda tensors: tensors.pop(f"{EXPERTS}.down_proj_blocks"), "BASE_MODEL_INVALID", "lacks"),
        (lambda tensors: pop_all(tensors, "down_proj_blocks"), "BASE_MODEL_INVALID", "lacks"),
        (lambda tensors: tensors[f"{EXPERTS}.down_proj_scales"].fill_(255), "NON_FINITE_WEIGHTS", "down_proj"),
        (
            lambda tensors: tensors.update({f"{EXPERTS}.down_proj_scales": torch.zeros(4, 64, 3, dtype=torch.uint8)}),
            "BASE_MODEL_INVALID",
            "shape",
        ),
    ],
)
def test_a_damaged_stack_is_refused(packed, tmp_path, change, reason, said):
    tensors = load_file(packed / "model.safetensors")
    change(tensors)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    error = refusal(packed, tmp_path)
    assert error.reason == reason
    assert said in str(error)


def test_another_model_in_this_form_is_refused(packed, tmp_path):
    configure(packed, model_type="llama")
    error = refusal(packed, tmp_path)
    assert error.reason == "BASE_QUANTIZATION_UNSUPPORTED"
    assert "'llama'" in str(error)
