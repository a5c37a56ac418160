"""Layers that predict further tokens: delivered where llama.cpp has a place for them, named where it has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.errors import GGUFExportError
from slipway_gguf.weights.tensors import plan_file
from support.models.gguf_models import (
    edit_model,
    file_fields,
    llama_distributions,
    save_family,
    stored_tensors,
    torch_distributions,
    write_gguf,
)
from support.models.gguf_sizes import VOCABULARY

pytestmark = pytest.mark.own_process


_TOKENS = np.random.default_rng(3).integers(3, VOCABULARY, 24).tolist()


Tensors = dict[str, torch.Tensor]


def _next_of_qwen(tensors: Tensors) -> None:
    """Add a layer that predicts a further token, with the names of Qwen3.5."""
    last = {name: each for name, each in tensors.items() if name.startswith("model.layers.3.")}
    tensors |= {name.replace("model.layers.3.", "mtp.layers.0."): each.clone() for name, each in last.items()}
    tensors["mtp.fc.weight"] = torch.randn(64, 128)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.randn(64)


def _next_of_layers(tensors: Tensors) -> None:
    """Add such a layer with the names of GLM and DeepSeek."""
    last = {name: each for name, each in tensors.items() if name.startswith("model.layers.2.")}
    tensors |= {name.replace("layers.2.", "layers.3."): each.clone() for name, each in last.items()}
    tensors["model.layers.3.eh_proj.weight"] = torch.randn(64, 128)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.3.{name}.weight"] = torch.randn(64)


@pytest.mark.parametrize(
    ("family", "add", "layer"),
    [
        ("qwen35", _next_of_qwen, 4),
        pytest.param("qwen35moe", _next_of_qwen, 4, marks=pytest.mark.slow),
        pytest.param("glm4moe", _next_of_layers, 3, marks=pytest.mark.slow),
    ],
)
def test_layers_that_predict_further_tokens_are_delivered(
    family: str, add: Callable[[Tensors], None], layer: int, tmp_path: Path
) -> None:
    model = save_family(family, tmp_path / "model")
    edit_model(tmp_path / "model", add)
    file, ctx = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    fields, stored = file_fields(file), stored_tensors(file)
    assert fields[f"{family}.block_count"] == layer + 1
    assert fields[f"{family}.nextn_predict_layers"] == 1
    names = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    assert {f"blk.{layer}.nextn.{name}.weight" for name in names} <= stored.keys()
    assert "warnings" not in ctx.facts
    assert np.abs(llama_distributions(file, _TOKENS) - torch_distributions(model, _TOKENS)).max() < 2e-5


@pytest.mark.parametrize(("family", "add"), [("deepseek2", _next_of_layers), ("qwen3next", _next_of_qwen)])
def test_layers_without_a_place_are_left_out_and_named(
    family: str, add: Callable[[Tensors], None], tmp_path: Path
) -> None:
    save_family(family, tmp_path / "model")
    before = write_gguf(tmp_path / "model", tmp_path / "before", level="f32")[0].read_bytes()
    edit_model(tmp_path / "model", add)
    file, ctx = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    assert file.read_bytes() == before
    [warning] = ctx.facts["warnings"]
    assert "predict further tokens" in warning
    assert min(ctx.facts["left_out"]) in warning


@pytest.mark.parametrize(
    ("family", "add", "lost", "named"),
    [
        ("qwen35", _next_of_qwen, "mtp.layers.0.self_attn.q_norm.weight", "blk.4.attn_q_norm.weight"),
        ("qwen35", _next_of_qwen, "mtp.fc.weight", "blk.4.nextn.eh_proj.weight"),
        ("qwen35moe", _next_of_qwen, "mtp.layers.0.mlp.gate.weight", "blk.4.ffn_gate_inp.weight"),
        (
            "glm4moe",
            _next_of_layers,
            "model.layers.3.post_attention_layernorm.weight",
            "blk.3.post_attention_norm.weight",
        ),
        ("glm4moe", _next_of_layers, "model.layers.3.hnorm.weight", "blk.3.nextn.hnorm.weight"),
    ],
)
def test_a_layer_that_predicts_further_tokens_is_whole(
    family: str, add: Callable[[Tensors], None], lost: str, named: str, tmp_path: Path
) -> None:
    """llama.cpp loads no file that lacks one of these."""
    save_family(family, tmp_path)
    edit_model(tmp_path, add)
    plan_file(tmp_path)
    edit_model(tmp_path, lambda tensors: tensors.__delitem__(lost))
    with pytest.raises(GGUFExportError, match=re.escape(f"the multi-token head has no tensor for {named!r}")) as caught:
        plan_file(tmp_path)
    assert caught.value.reason == "GGUF_INVALID"
