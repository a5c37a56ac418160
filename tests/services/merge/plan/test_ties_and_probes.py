"""Weights stored twice, layers that happen to be unchanged, and tensors that stand for the same thing."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from slipway.model.adapters.adapter_config import parse_adapter_config
from slipway.model.safetensors_file import read_safetensors
from slipway_merge.tensors.tensor_io import TensorReader
from support.models.merge_cases import load, logits
from support.models.merge_forms import lora, save_form

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def change(path, **tensors):
    stored = load_file(path)
    save_file(stored | tensors, path, metadata={"format": "pt"})
    return stored


def check_logits(case, out):
    expected = logits(case.reference(torch.float32))
    assert torch.allclose(logits(load(out, dtype=torch.float32)), expected, atol=1e-5)


@pytest.mark.parametrize(
    "lora_options", [{"trainable_token_indices": [1, 5, 7]}, {"resize": 100}], ids=["rows", "resized"]
)
def test_tied_weights_that_are_stored_twice_stay_the_same(make_case, lora_options):
    case = make_case("qwen3-tied", target_modules=["q_proj"], **lora_options)
    base = load_file(case.base / "model.safetensors")
    change(case.base / "model.safetensors", **{HEAD: base[EMBEDDING].clone()})
    out, ctx = case.merge(verify="spot")
    merged = load_file(out / "model.safetensors")
    assert torch.equal(merged[HEAD], merged[EMBEDDING])
    assert merged[HEAD].shape != base[EMBEDDING].shape or not torch.equal(merged[HEAD], base[EMBEDDING])
    assert ctx.facts["untied"] is False
    if "resize" not in lora_options:  # peft loads an adapter of another vocabulary only onto a resized base
        check_logits(case, out)


def test_weights_called_tied_but_stored_with_different_values_are_two(make_case):
    case = make_case("qwen3-tied", target_modules=["q_proj"], trainable_token_indices=[1, 5, 7])
    base = load_file(case.base / "model.safetensors")
    change(case.base / "model.safetensors", **{HEAD: base[EMBEDDING] + 1})
    out, _ = case.merge(verify="spot")
    merged = load_file(out / "model.safetensors")
    assert torch.equal(merged[HEAD], base[EMBEDDING] + 1)
    assert not torch.equal(merged[EMBEDDING], base[EMBEDDING])


def test_a_first_layer_without_a_change_does_not_speak_for_the_others(tmp_path):
    case, _ = save_form(tmp_path, lora("qwen3", "q_proj", "up_proj", use_dora=True), torch.float32)
    path, base = case.adapter / "adapter_model.safetensors", load_file(case.base / "model.safetensors")
    weights = load_file(path)
    first = {key: value for key, value in weights.items() if ".layers.0.self_attn." in key}
    norm = base["model.layers.0.self_attn.q_proj.weight"].norm(dim=1)
    change(path, **{k: norm if "magnitude" in k else v * 0 if "lora_B" in k else v for k, v in first.items()})
    out, _ = case.merge(verify="spot")
    check_logits(case, out)


def test_rows_of_one_embedding_brought_twice(make_case):
    case = make_case("qwen3", target_modules=["q_proj"], trainable_token_indices=[1, 5, 7])
    path = case.adapter / "adapter_model.safetensors"
    [name] = [key for key in load_file(path) if "trainable_tokens" in key]
    change(path, **{name.removeprefix("base_model.model."): load_file(path)[name] * 2})
    with pytest.raises(ModelMergeError, match="stand for the same rows"):
        case.merge()


@pytest.mark.parametrize("place", [0, 4, 9])
def test_same_values_in_two_types_are_compared_to_the_last_block(tmp_path, place):
    values = torch.arange(10.0)
    save_file({"wide": values, "narrow": values.bfloat16()}, tmp_path / "a.safetensors")
    other = values.clone()
    other[place] += 1
    save_file({"narrow": other.bfloat16()}, tmp_path / "b.safetensors")
    first = read_safetensors(tmp_path / "a.safetensors").tensors
    second = read_safetensors(tmp_path / "b.safetensors").tensors
    with TensorReader() as reader:
        assert reader.same(first["wide"], first["narrow"], block_bytes=4 * np.dtype(np.float64).itemsize)
        assert not reader.same(first["wide"], second["narrow"], block_bytes=4 * np.dtype(np.float64).itemsize)


def test_a_pattern_per_module_is_matched_in_reasonable_time():
    modules = [f"model.layers.{number}.mlp.down_proj" for number in range(800)]
    config = parse_adapter_config({"peft_type": "LORA", "r": 4, "rank_pattern": dict.fromkeys(modules, 2)})
    begin = time.process_time()
    assert {config.rank_of(name) for name in modules} == {2}
    assert config.rank_of("model.layers.800.mlp.down_proj") == 4
    assert time.process_time() - begin < 5  # without keeping the patterns: minutes
