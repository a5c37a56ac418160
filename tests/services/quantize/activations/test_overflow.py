"""fp16 with text at hand: what it overflows stays float32 in a graph, and is refused in a transformers folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slipway.errors import ModelExportError
from slipway.stage import Context
from support.models.quantize_models import divergence, onnx_logits

from .conftest import Trained

Quantize = Callable[..., tuple[Path, Context]]
AtLevel = Callable[[str], tuple[Path, Context]]
TOKENS = np.random.default_rng(3).integers(3, 1000, (4, 48))
MLP = ["model.layers.0.mlp.down_proj.weight.T", "model.layers.0.mlp.up_proj.weight.T"]


def test_layers_that_overflow_stay_float32(quantize: Quantize, trained: Trained) -> None:
    result, ctx = quantize(trained.scaled_graph, trained.data, format="onnx", level="fp16")
    noted = json.loads((result / "quantization.json").read_text())
    assert sorted(noted["tensors"]["kept"]) == MLP
    assert max(noted["overflow"]["float32"].values()) > 65504
    assert noted["overflow"]["divergence"] < 1e-5
    assert any("stay float32" in warning for warning in ctx.facts["warnings"])
    assert divergence(onnx_logits(trained.graph, TOKENS), onnx_logits(result, TOKENS))[0] < 1e-5


@pytest.mark.slow
def test_without_text_they_are_not_found(quantize: Quantize, trained: Trained) -> None:
    """The planted fault is one: the check's few tokens do not show it."""
    _, ctx = quantize(trained.scaled_graph, format="onnx", level="fp16")
    assert (ctx.facts["check"], ctx.facts["tensors_kept"]) == ("passed", 0)


@pytest.mark.slow
def test_a_model_that_fits_is_float16_throughout(at_level: AtLevel, quantize: Quantize, trained: Trained) -> None:
    with_text, ctx = at_level("fp16")
    without, _ = quantize(trained.graph, format="onnx", level="fp16")
    assert (with_text / "model.onnx.data").read_bytes() == (without / "model.onnx.data").read_bytes()
    assert ctx.facts["overflow"]["float32"] == {}


def test_a_transformers_folder_is_refused_with_its_layers(quantize: Quantize, trained: Trained) -> None:
    with pytest.raises(ModelExportError, match=r"model\.layers\.0\.mlp\.down_proj \(input\)") as caught:
        quantize(trained.scaled_model, trained.data, format="pytorch", level="fp16")
    assert caught.value.reason == "NON_FINITE_OUTPUT"
    assert "bf16" in caught.value.remedy


@pytest.mark.slow
def test_bf16_holds_what_fp16_does_not(quantize: Quantize, trained: Trained) -> None:
    assert quantize(trained.scaled_model, trained.data, format="pytorch", level="bf16")[1].facts["check"] == "passed"


@pytest.mark.slow
def test_a_transformers_folder_that_fits_is_described(quantize: Quantize, trained: Trained) -> None:
    _, ctx = quantize(trained.model, trained.data, format="pytorch", level="fp16")
    assert 0 < ctx.facts["overflow"]["largest"] < 32752
    assert ctx.facts["overflow"]["near"] == {}


@pytest.mark.slow
def test_a_model_that_no_text_fits_is_made_as_without(quantize: Quantize, trained: Trained, tmp_path: Path) -> None:
    gpt2 = save_gpt2(tmp_path / "gpt2", trained.model)
    _, ctx = quantize(gpt2, trained.data, format="pytorch", level="fp16")
    assert "(in, out)" in ctx.facts["overflow"]["not_run"]


def save_gpt2(folder: Path, tokenizer: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=1024, n_positions=64, n_embd=32, n_layer=1, n_head=2)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder
