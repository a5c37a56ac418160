"""A decoder as one graph per layer computes what the model does, by its own program, in the comparison and in validation."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.errors import ModelExportError
from slipway.stage import Context
from support.models.family_models import make_family_model
from support.models.onnx_models import Exported
from support.models.table_models import ROWS, Row, make_row

LEGACY = {"engine": "legacy", "layered": True}


def row(name: str, folder: Path) -> Path:
    return make_row(next(each for each in ROWS if each.name == name), folder)


def test_each_layer_is_a_graph_and_a_program_runs_them(tmp_path: Path, export: Callable[..., Exported]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from slipway.proof.runtime import Step
    from slipway_validate.runner.onnx_graphs.load import load

    source = row("SmolLM3", tmp_path / "model")  # its second layer has no rotation
    exported = export(source, **LEGACY)
    folder = exported.folder / "onnx-layered"
    assert exported.facts["parity"] == "passed"
    assert exported.facts["files"] == ["embedding.onnx", "layer_0.onnx", "layer_1.onnx", "head.onnx"]
    assert json.loads((exported.folder / "onnx_export.json").read_text())["layered"] is True
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    prompt = [5, 9, 17, 4]
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0, 4:].tolist()
    example = runpy.run_path(str(folder / "example.py"), run_name="example")
    for one_at_a_time in (False, True):
        layers = example["Layers"](folder, one_at_a_time=one_at_a_time)
        found = example["generate"](layers, prompt, max_new_tokens=9)
        assert found == wanted[: len(found)]
        assert len(found) > 2
    ids, mask = np.array([[1, 1, 7, 8], [5, 6, 7, 8]]), np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    validated = load(exported.folder, threads=1)
    logits, past = validated.forward(Step(ids, mask, positions))
    more = Step(ids[:, :1], np.concatenate([mask, [[1], [1]]], axis=1), positions[:, -1:] + 1, past=past)
    following, _ = validated.forward(more)
    with torch.no_grad():
        whole = model(
            input_ids=torch.from_numpy(np.concatenate([ids, ids[:, :1]], axis=1)),
            attention_mask=torch.from_numpy(more.attention_mask),
            position_ids=torch.from_numpy(np.concatenate([positions, more.position_ids], axis=1)),
        ).logits.numpy()
    np.testing.assert_allclose(logits[mask == 1], whole[:, :4][mask == 1], atol=1e-5)
    np.testing.assert_allclose(following[:, 0], whole[:, 4], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "params"),
    [
        *((name, LEGACY) for name in ("Gemma 3, window", "GPT-2", "Falcon", "DeepSeek-V3")),
        ("GPT-J", {"engine": "dynamo", "layered": True}),
        ("Llama", {"layered": True, "opset": 14, "optimization": "none"}),
    ],
)
def test_decoders_in_layers(tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any]) -> None:
    exported = export(row(name, tmp_path / "model"), **params)
    assert exported.facts["parity"] == "passed"
    assert exported.facts["parity_max_abs_diff"] < 1e-4
    assert set(exported.facts["checks"].values()) <= {"passed"} | {
        reason for reason in exported.facts["checks"].values() if reason.startswith("not run: the reference cannot run")
    }


@pytest.mark.slow
def test_layers_that_differ_in_weights_alone_are_traced_once(tmp_path: Path) -> None:
    import transformers

    from slipway_onnx_export.forms.components import components_of
    from slipway_onnx_export.layered.blocks import split
    from slipway_onnx_export.loading.weightless import build_weightless
    from slipway_onnx_export.source import open_source

    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    settings = {"sliding_window": 8, "layer_types": kinds * 2, "num_hidden_layers": 6, "head_dim": 16}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.Gemma3TextConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64, **settings)
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    model = build_weightless(source, engine="legacy", attention=("eager",))
    assert split(model, components_of(model, source)).kinds == ((0, 1, 3, 4), (2, 5))


@pytest.mark.slow
def test_layers_are_numbered_so_that_names_sort_in_their_order(tmp_path: Path, export: Callable[..., Exported]) -> None:
    """Twelve layers, each with weights of its own: in another order the results are others."""
    from slipway.proof.runtime import Step
    from slipway_validate.runner.onnx_graphs.load import load

    found = next(each for each in ROWS if each.name == "Llama")
    source = make_row(Row(found.name, found.model, {**found.settings, "num_hidden_layers": 12}), tmp_path / "model")
    exported = export(source, **LEGACY)
    names = ["embedding.onnx", *(f"layer_{number:02}.onnx" for number in range(12)), "head.onnx"]
    assert exported.facts["files"] == names
    assert exported.facts["parity"] == "passed"
    folder = exported.folder / "onnx-layered"
    example = runpy.run_path(str(folder / "example.py"), run_name="example")
    written = example["generate"](example["Layers"](folder, one_at_a_time=False), [5, 9, 17, 4], max_new_tokens=5)
    ids = np.array([[5, 9, 17, 4]])
    logits, _ = load(exported.folder, threads=1).forward(Step(ids, np.ones((1, 4), np.int64), np.arange(4)[None]))
    assert written[:1] == [int(logits[0, -1].argmax())][: len(written)]
    assert json.loads((exported.folder / "onnx_export.json").read_text())["statistics"]["after"]["nodes"] > 12


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Bloom", "passes alibi to its layers"),
        pytest.param("marian", "is no decoder with a cache", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_cannot_be_split_is_told_by_name(
    tmp_path: Path, export: Callable[..., Exported], name: str, why: str
) -> None:
    source = row(name, tmp_path / "model") if name == "Bloom" else make_family_model(name, tmp_path / "model")
    with pytest.raises(ModelExportError) as caught:
        export(source, **LEGACY)
    assert caught.value.reason == "FAMILY_UNSUPPORTED"
    assert why in caught.value.message


@pytest.mark.slow
def test_a_model_in_layers_is_not_quantized_by_name(tmp_path: Path, export: Callable[..., Exported]) -> None:
    from slipway_quantize.stage import STAGE

    source = row("Llama", tmp_path / "model")
    folder = export(source, **LEGACY).folder
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "work").mkdir()
    params = STAGE.params(format="onnx", level="int8")
    with pytest.raises(ModelExportError) as caught:
        STAGE.run({"model": tmp_path / "copy"}, params, Context(workdir=tmp_path / "work"))
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert "one graph per layer" in caught.value.message


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"shapes": "batch", "batch": 2}, {"shapes": "static", "sequence": 2, "past": 30}], ids=str
)
def test_layers_of_fixed_shapes(tmp_path: Path, export: Callable[..., Exported], sizes: dict[str, Any]) -> None:
    """Comparison, validation and the example fit texts of any length to them; a prompt is longer than a call."""
    from slipway.proof.runtime import Step
    from slipway_validate.runner.onnx_graphs.load import load

    source = row("Llama", tmp_path / "model")
    exported = export(source, **LEGACY, **sizes)
    assert exported.facts["parity"] == "passed"
    axes = exported.facts["axes"]
    if sizes["shapes"] == "static":
        assert {
            axis for graph in axes.values() for each in graph.values() for axis in each if isinstance(axis, str)
        } == set()
        assert axes["layer_0.onnx"]["past_key_values.0.key"][2] == 30
    assert axes["embedding.onnx"]["input_ids"] == [sizes.get("batch", 1), sizes.get("sequence", "sequence")]
    example = runpy.run_path(str(exported.folder / "onnx-layered" / "example.py"), run_name="example")
    prompt = [5, 9, 17, 4, 11]
    found = example["generate"](example["Layers"](exported.folder / "onnx-layered"), prompt, max_new_tokens=6)
    usual = export(source, **LEGACY).folder / "onnx-layered"
    assert found == example["generate"](example["Layers"](usual), prompt, max_new_tokens=6)
    assert len(found) > 2
    ids = np.array([prompt, prompt[::-1]])
    step = Step(ids, np.ones_like(ids), np.arange(5)[None].repeat(2, axis=0))
    logits, past = load(exported.folder, threads=1).forward(step)
    wanted, _ = load(usual.parent, threads=1).forward(step)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    more = Step(ids[:, :1], np.ones((2, 6), np.int64), np.full((2, 1), 5), past=past)
    following, _ = load(exported.folder, threads=1).forward(more)
    whole = Step(
        np.concatenate([ids, ids[:, :1]], axis=1), np.ones((2, 6), np.int64), np.arange(6)[None].repeat(2, axis=0)
    )
    np.testing.assert_allclose(following[:, 0], load(usual.parent, threads=1).forward(whole)[0][:, 5], atol=1e-5)
