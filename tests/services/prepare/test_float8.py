"""Bases in 8-bit floats, with every form of scales they come with."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from slipway.model.base_format import base_format
from slipway.model.folder import ModelFolder
from support.models.prepare_models import linears, loads, refusal, run, stored


def test_stacked_experts_are_not_taken_without_their_scales(dense, tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    experts = {name: torch.randn(2, 4, 4).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((2, 1, 1), 3.0)}
    folder = stored(dense, tmp_path, load_file(dense / "model.safetensors") | experts, {"quant_method": "fp8"})
    assert refusal(folder, tmp_path).about["tensor"].startswith(name)


def test_blocks_of_8_bit_floats_match_transformers_own(dense, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors = load_file(dense / "model.safetensors")
    expected = dict(tensors)
    for name in linears(tensors):
        rows, columns = tensors[name].shape
        scale = torch.rand(rows // 32, columns // 32) * 0.01 + 0.001
        weight = (tensors[name].float() / scale.repeat_interleave(32, 0).repeat_interleave(32, 1)).to(
            torch.float8_e4m3fn
        )
        tensors[name], tensors[f"{name}_scale_inv"] = weight, scale
        expected[name] = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    folder = stored(dense, tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    out, found, facts = run(folder, tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(found) == sorted(expected)
    assert facts["method"] == "fp8"
    assert "dequantized to bfloat16" in facts["warnings"][0]
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    loads(out)


def test_a_tensor_without_values_has_no_blocks(dense, tmp_path):
    nothing = {"extra.weight": torch.empty(0, 5).to(torch.float8_e4m3fn), "extra.weight_scale_inv": torch.empty(0, 1)}
    tensors = load_file(dense / "model.safetensors") | nothing
    error = refusal(stored(dense, tmp_path, tensors, {"quant_method": "fp8"}), tmp_path)
    assert (error.reason, error.about["tensor"]) == ("BASE_MODEL_INVALID", "extra.weight_scale_inv")


def test_a_last_block_may_be_shorter(dense, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    name = linears(tensors)[0]
    rows, columns = tensors[name].shape
    scale = torch.rand(-(-rows // 48), -(-columns // 48))
    tensors[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = scale
    folder = stored(dense, tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [48, 48]})
    spread = scale.repeat_interleave(48, 0)[:rows].repeat_interleave(48, 1)[:, :columns]
    assert torch.equal(run(folder, tmp_path)[1][name], (tensors[name].float() * spread).bfloat16())


@pytest.mark.parametrize("shape", ["tensor", "row", "none"])
def test_one_scale_a_row_of_scales_or_none(dense, tmp_path, shape):
    tensors = load_file(dense / "model.safetensors")
    name = linears(tensors)[0]
    weight = torch.randn(tensors[name].shape).to(torch.float8_e4m3fn)
    scale = {"tensor": torch.tensor([0.25]), "row": torch.rand(len(weight), 1), "none": torch.tensor(1.0)}[shape]
    tensors[name] = weight
    tensors |= {} if shape == "none" else {f"{name}_scale": scale}
    quantization = {"row": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}}.get(shape)
    folder = stored(dense, tmp_path, tensors, quantization)
    assert base_format(ModelFolder.open(folder)) in {"fp8", "fbgemm_fp8"}
    assert torch.equal(run(folder, tmp_path)[1][name], (weight.float() * scale).bfloat16())
