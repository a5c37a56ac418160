"""Mixed precision: the layers named in keep stay as they are, in both formats, and the result loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.torch import load_file

from slipway.errors import QuantizationError
from slipway.stage import Context
from support.models.quantize_models import onnx_logits, prompt, torch_logits

Quantize = Callable[..., tuple[Path, Context]]
KEEP = ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj")


def test_kept_layers_of_a_folder_are_those_of_the_source(quantize: Quantize, tiny: Path) -> None:
    mixed, ctx = quantize(tiny, format="pytorch", level="int4", keep=KEEP)
    before, after = load_file(tiny / "model.safetensors"), load_file(mixed / "model.safetensors")
    for name in KEEP:
        assert (before[f"{name}.weight"] == after[f"{name}.weight"]).all()
    assert "model.layers.0.mlp.down_proj.weight_packed" in after
    report = json.loads((mixed / "quantization.json").read_text())
    assert report["mixed"] is True
    assert report["tensors"]["kept"][f"{KEEP[0]}.weight"] == "asked for by keep"
    assert set(KEEP) <= set(json.loads((mixed / "config.json").read_text())["quantization_config"]["ignore"])
    assert ctx.facts["check"] == "passed"
    whole, _ = quantize(tiny, format="pytorch", level="int4")
    exact, tokens = torch_logits(tiny, prompt()), prompt()
    assert np.square(torch_logits(mixed, tokens) - exact).sum() < np.square(torch_logits(whole, tokens) - exact).sum()


def test_kept_layers_of_a_graph_stay_products(quantize: Quantize, tiny_onnx: Path) -> None:
    mixed, ctx = quantize(tiny_onnx, format="onnx", level="int4", keep=KEEP)
    names = {tensor.name for tensor in onnx.load(mixed / "model.onnx", load_external_data=False).graph.initializer}
    assert {f"{name}.weight.T" for name in KEEP} <= names
    assert "model.layers.0.mlp.down_proj.weight.T.q4" in names
    assert ctx.facts["check"] == "passed"
    assert np.isfinite(onnx_logits(mixed, prompt())).all()


def test_a_name_without_the_model_s_prefix_is_enough_and_an_unknown_one_is_said(quantize: Quantize, tiny: Path) -> None:
    mixed, ctx = quantize(
        tiny, format="pytorch", level="int4", keep=("layers.1.mlp.down_proj", "layers.7.mlp.down_proj")
    )
    assert "model.layers.1.mlp.down_proj.weight" in load_file(mixed / "model.safetensors")
    assert any("'layers.7.mlp.down_proj'" in warning for warning in ctx.facts["warnings"])


def test_everything_cannot_be_kept(quantize: Quantize, tiny: Path) -> None:
    with pytest.raises(QuantizationError) as raised:
        quantize(
            tiny,
            format="pytorch",
            level="int4",
            keep=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
        )
    assert raised.value.reason == "QUANTIZATION_UNSUPPORTED"
