"""Quantized bases: what they become, and what is refused because a part of it is missing, left over or of another shape."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from support.models.prepare_models import linears, loads, refusal, run, stored


def test_zero_points_that_fill_no_whole_words_are_refused(gptq, dense, tmp_path):
    _, tensors, _, settings = gptq
    module = next(name for name in sorted(tensors) if name.endswith(".qweight")).removesuffix(".qweight")
    cut = {f"{module}.{part}": tensors[f"{module}.{part}"][:, :-4] for part in ("qweight", "scales")}
    shutil.rmtree(tmp_path / "stored")
    error = refusal(stored(dense, tmp_path, tensors | cut, settings), tmp_path)
    assert (error.reason, error.about["tensor"]) == ("BASE_MODEL_INVALID", f"{module}.qweight")


def test_a_gptq_model_becomes_dense(gptq, tmp_path):
    folder, _, expected, _ = gptq
    out, found, facts = run(folder, tmp_path)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (facts["method"], facts["computed"]) == ("gptq", len(linears(expected)))
    assert facts["details"]["bits"] == 4
    loads(out)


def test_every_missing_part_and_every_part_left_over_is_named(gptq, dense, tmp_path):
    _, tensors, expected, settings = gptq
    victim = linears(expected)[0].removesuffix(".weight")
    for part in ("qweight", "qzeros", "scales"):
        folder = tmp_path / part
        rest = {name: value for name, value in tensors.items() if name != f"{victim}.{part}"}
        error = refusal(stored(dense, folder, rest, settings), folder)
        assert error.reason == "BASE_MODEL_INVALID"
        assert victim in str(error)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "hqq"}, "BASE_QUANTIZATION_UNSUPPORTED"),
        ({"quant_method": ["gptq"]}, "BASE_QUANTIZATION_UNSUPPORTED"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "BASE_QUANTIZATION_UNSUPPORTED"),
        ({"quant_method": "awq", "version": "gemv"}, "BASE_QUANTIZATION_UNSUPPORTED"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "BASE_MODEL_INVALID"),
        ({"quant_method": "bitsandbytes"}, "BASE_MODEL_INVALID"),
    ],
    ids=["unknown", "list", "marlin", "gemv", "groups", "other-method"],
)
def test_another_method_is_refused_with_its_name(gptq, dense, tmp_path, settings, reason):
    error = refusal(stored(dense, tmp_path / "again", gptq[1], settings), tmp_path)
    assert error.reason == reason
    assert error.remedy


@pytest.mark.parametrize("words", [torch.tensor(1).int(), torch.empty(0, 64).int()], ids=["number", "nothing"])
@pytest.mark.parametrize("size", [32, -1])
def test_a_weight_of_no_rows_is_refused_by_its_name(gptq, dense, tmp_path, words, size):
    _, tensors, expected, settings = gptq
    module = linears(expected)[0].removesuffix(".weight")
    cut = {name: value for name, value in tensors.items() if name != f"{module}.g_idx"} | {f"{module}.qweight": words}
    error = refusal(stored(dense, tmp_path / "again", cut, settings | {"group_size": size}), tmp_path)
    assert (error.reason, error.about["tensor"]) == ("BASE_MODEL_INVALID", f"{module}.qweight")


@pytest.mark.parametrize(
    ("stored_as", "bits", "kind"),
    [("pack-quantized", 9, "int"), ("pack-quantized", 0, "int"), ("float-quantized", 4, "float")],
)
def test_widths_that_compressed_tensors_cannot_unpack_are_refused(dense, tmp_path, stored_as, bits, kind):
    tensors = load_file(dense / "model.safetensors")
    name = linears(tensors)[0]
    tensors[f"{name}_scale"] = torch.ones(len(tensors[name]), 1)
    if stored_as == "pack-quantized":
        weight = tensors.pop(name)
        words = -(-weight.shape[1] * bits // 32)
        tensors[f"{name}_packed"] = torch.zeros(len(weight), words, dtype=torch.int32)
        tensors[f"{name}_shape"] = torch.tensor(weight.shape)
    scheme = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "strategy": "channel"}}
    settings = {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": {"group_0": scheme}}
    error = refusal(stored(dense, tmp_path, tensors, settings), tmp_path)
    assert error.reason == "BASE_QUANTIZATION_UNSUPPORTED"
    assert f"{kind} of {bits} bits" in error.message


def test_shapes_that_do_not_fit_are_refused_before_anything_is_written(gptq, dense, tmp_path):
    _, tensors, expected, settings = gptq
    name = linears(expected)[0].removesuffix("weight") + "scales"
    error = refusal(stored(dense, tmp_path / "again", tensors | {name: tensors[name][:, :-1]}, settings), tmp_path)
    assert error.reason == "BASE_MODEL_INVALID"
    assert not (tmp_path / "work" / "base").exists()


def test_a_missing_tensor_is_found_by_the_models_class(dense, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    tensors.pop("model.norm.weight")
    error = refusal(stored(dense, tmp_path, tensors), tmp_path, merge_onto="nf4")
    assert (error.reason, error.about["tensor"]) == ("BASE_MODEL_INVALID", "model.norm.weight")


def test_infinity_is_refused(gptq, dense, tmp_path):
    _, tensors, expected, settings = gptq
    name = linears(expected)[0].removesuffix("weight") + "scales"
    tensors[name] = torch.full_like(tensors[name], torch.inf)
    error = refusal(stored(dense, tmp_path / "again", tensors, settings), tmp_path)
    assert error.reason == "NON_FINITE_WEIGHTS"
