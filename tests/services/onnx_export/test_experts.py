"""Mixtures of experts: weights under their loaded names, joined while they are read, and a form that a trace does not fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipway.errors import ModelExportError
from slipway_onnx_export.loading.conversion import Stack, place_of
from slipway_onnx_export.loading.weightless import build_weightless, find_misfits, tied_weights
from slipway_onnx_export.source import open_source
from support.models.onnx_models import Exported
from support.models.table_models import ROWS, make_row

MIXTURES = ("Mixtral", "Qwen3-MoE", "Qwen2-MoE", "DeepSeek-V3")


def folder_of(name: str, folder: Path) -> Path:
    return make_row(next(row for row in ROWS if row.name == name), folder)


def without(folder: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", MIXTURES)
def test_weights_are_those_that_transformers_loads(tmp_path: Path, name: str) -> None:
    import transformers

    source = open_source(folder_of(name, tmp_path / "model"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    found = tied_weights(build_weightless(source, engine="dynamo", attention=("eager",)), source)
    stacks = 0
    for key, value in loaded.named_parameters():
        weight = found[key]
        stacks += isinstance(weight, Stack)
        torch.testing.assert_close(weight[:] if isinstance(weight, Stack) else weight, value.detach(), rtol=0, atol=0)
    assert stacks
    assert not find_misfits(source, engine="dynamo")


@pytest.mark.parametrize("name", MIXTURES)
def test_every_expert_computes_what_the_chosen_ones_do(tmp_path: Path, name: str) -> None:
    import transformers

    from slipway_onnx_export.loading.weightless import NAME, use_every_expert

    folder = folder_of(name, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    tokens = torch.randint(3, 48, (3, 7), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = model(tokens).logits
        use_every_expert(model)
        found = model(tokens).logits
    assert model.config._experts_implementation == NAME
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_buffers_of_the_folder_reach_the_graph(tmp_path: Path) -> None:
    source = open_source(folder_of("DeepSeek-V3", tmp_path / "model"))
    model = build_weightless(source, engine="dynamo", attention=("eager",))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert source.weights[name].abs().max() > 0
    torch.testing.assert_close(model.get_buffer(name), source.weights[name])


def test_a_stack_reads_only_the_experts_asked_for() -> None:
    parts = tuple((torch.full((2, 3), float(expert)), torch.full((1, 3), expert + 0.5)) for expert in range(4))
    stack = Stack(parts)
    assert (stack.shape, stack.dim(), stack.numel(), len(stack)) == ((4, 3, 3), 3, 36, 4)
    assert stack[1:2].shape == (1, 3, 3)
    assert stack[2:3][0].tolist() == [[2.0] * 3, [2.0] * 3, [2.5] * 3]
    swapped = stack.permute((0, 2, 1))
    torch.testing.assert_close(swapped[:], stack[:].transpose(1, 2))
    assert place_of(stack) == place_of(Stack(parts)) != place_of(swapped)


@pytest.mark.parametrize("lost", ["w1", "w2"])
def test_a_lost_expert_is_the_folder_s_fault(tmp_path: Path, export: Callable[..., Exported], lost: str) -> None:
    folder = folder_of("Mixtral", tmp_path / "model")
    name = next(key for key in open_source(folder).weights if f".1.{lost}." in key)
    without(folder, name)
    with pytest.raises(ModelExportError) as caught:
        export(folder)
    assert caught.value.reason == "BASE_MODEL_INVALID"
    assert "experts" in caught.value.about["tensor"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), [("Qwen3-MoE", "legacy"), ("DeepSeek-V3", "dynamo")])
def test_traced_mixtures(tmp_path: Path, export: Callable[..., Exported], name: str, engine: str) -> None:
    exported = export(folder_of(name, tmp_path / "model"), engine=engine)
    assert exported.facts["parity_max_abs_diff"] < 1e-4
    assert [list(tensor.dims) for tensor in exported.onnx.graph.initializer if len(tensor.dims) == 3]
