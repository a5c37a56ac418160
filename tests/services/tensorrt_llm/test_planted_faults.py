"""What is wrong in a checkpoint is found and named: swapped layers, lost tensors and biases, a wrong order, another number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import TensorRTLLMExportError
from slipway.model.configuration import ModelConfig
from slipway.model.safetensors_file import read_weights
from slipway_tensorrt_llm.models.model import model_of
from slipway_tensorrt_llm.weights.checks import check_checkpoint
from slipway_tensorrt_llm.weights.planning import Plan
from support.models.tensorrt_llm_models import save_model, write_checkpoint

Tensors = dict[str, torch.Tensor]
_LAYER = "transformer.layers.0."


def swapped(one: str, other: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()

    return change


def rolled(name: str, by: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].roll(by, 0).contiguous()

    return change


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def filled(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][-1] = value

    return change


def added(tensors: Tensors) -> None:
    tensors["transformer.layers.0.attention.rope"] = torch.zeros(2)


def check(folder: Path, model: Path, *, tp: int) -> None:
    plan = Plan(model_of(ModelConfig.read(model)), read_weights(model), tp=tp, pp=1)
    check_checkpoint(folder, plan, dtype="F32", on_bytes=lambda _: None)


@pytest.mark.parametrize(
    ("name", "rank", "change", "said"),
    [
        ("llama", 1, swapped(f"{_LAYER}mlp.fc.weight", f"{_LAYER}mlp.gate.weight"), "mlp.fc.weight' are not those of 'model.layers.0.mlp.gate_proj"),
        ("llama", 0, swapped(f"{_LAYER}mlp.proj.weight", "transformer.layers.1.mlp.proj.weight"), "layers.0.mlp.proj.weight' are not those of 'model.layers.0"),
        ("llama", 1, rolled(f"{_LAYER}attention.qkv.weight", 16), "attention.qkv.weight' are not those of 'model.layers.0.self_attn.q_proj"),
        ("llama", 1, without(f"{_LAYER}post_layernorm.weight"), "rank1.safetensors is not what was to be written: it lacks .*post_layernorm"),
        ("llama", 0, added, "it has 'transformer.layers.0.attention.rope', which no graph takes"),
        ("llama", 1, filled("lm_head.weight", 0.5), "of 'lm_head.weight' are not zero"),
        ("llama-bias", 0, without(f"{_LAYER}attention.dense.bias"), "it lacks 'transformer.layers.0.attention.dense.bias'"),
        ("qwen2", 0, rolled(f"{_LAYER}attention.qkv.bias", 1), "attention.qkv.bias' are not those of 'model.layers.0.self_attn.q_proj.bias"),
        ("qwen3", 1, swapped(f"{_LAYER}attention.q_layernorm.weight", f"{_LAYER}attention.k_layernorm.weight"), "_layernorm.weight' are not those of 'model.layers.0.self_attn"),
        ("gemma2", 0, filled("transformer.ln_f.weight", 0.0), "transformer.ln_f.weight' are not those of 'model.norm.weight'"),
        ("phi3", 0, rolled(f"{_LAYER}mlp.fc.weight", 48), "mlp.fc.weight' are not those of 'model.layers.0.mlp.gate_up_proj"),
        ("gpt2", 1, swapped(f"{_LAYER}input_layernorm.bias", f"{_LAYER}post_layernorm.bias"), "input_layernorm.bias' are not those of 'transformer.h.0.ln_1"),
    ],
)  # fmt: skip
def test_a_fault_is_named(name: str, rank: int, change: Callable[[Tensors], None], said: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "model")
    folder, _ = write_checkpoint(tmp_path / "model", tmp_path / "work", tp=2)
    check(folder, tmp_path / "model", tp=2)
    file = folder / f"rank{rank}.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(TensorRTLLMExportError, match=said) as error:
        check(folder, tmp_path / "model", tp=2)
    assert error.value.reason == "TENSORRT_LLM_INVALID"


def test_a_configuration_of_other_heads_is_found(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    folder, _ = write_checkpoint(tmp_path / "model", tmp_path / "work", tp=2)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_key_value_heads": 4}))
    with pytest.raises(TensorRTLLMExportError, match=r"attention.qkv.weight"):
        check(folder, tmp_path / "model", tp=2)


def test_a_truncated_rank_is_found(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    folder, _ = write_checkpoint(tmp_path / "model", tmp_path / "work", tp=1)
    file = folder / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(TensorRTLLMExportError, match="truncated"):
        check(folder, tmp_path / "model", tp=1)
