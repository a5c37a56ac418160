"""Models with recurrent layers, experts and parts for images: what a file says and how it is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.model.configuration import ModelConfig
from slipway.proof.runtime import Step
from slipway_gguf.architectures import architecture_of, refusal_reason, text_part
from slipway_gguf.params import LEVELS
from slipway_gguf.runtime.llama import Llama
from slipway_gguf.runtime.model import GGUFModel
from slipway_gguf.weights.mixture import Sizes, read_importance, stored_kind
from slipway_gguf.weights.tensors import plan_file
from support.models.gguf_families import FAMILIES, settings_of
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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_an_architecture_by_its_settings_alone(family: str) -> None:
    config = ModelConfig(settings_of(family))
    found = architecture_of(text_part(config) or config)
    assert found is not None
    assert refusal_reason(config) == ""


def test_a_file_says_which_layers_have_attention(tmp_path: Path) -> None:
    save_family("lfm2", tmp_path / "model")
    fields = file_fields(write_gguf(tmp_path / "model", tmp_path / "work")[0])
    assert fields["lfm2.attention.head_count_kv"] == [0, 2, 0, 2]
    assert fields["lfm2.feed_forward_length"] == 64  # two thirds of 96, as the class computes
    assert fields["lfm2.shortconv.l_cache"] == 3


def test_older_names_of_kinds_of_layers_give_the_same_file(tmp_path: Path) -> None:
    save_family("granitehybrid", tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "one")
    assert file_fields(file)["granitehybrid.attention.head_count_kv"] == [0, 2, 0]
    edit_model(tmp_path / "model", lambda _: None, layer_types=["mamba", "attention", "mamba"])
    other, _ = write_gguf(tmp_path / "model", tmp_path / "other")
    assert other.read_bytes() == file.read_bytes()


def test_tensors_that_no_layer_uses_are_there_where_llama_cpp_wants_them(tmp_path: Path) -> None:
    save_family("gemma3n", tmp_path / "model")
    stored = stored_tensors(write_gguf(tmp_path / "model", tmp_path / "work", level="f32")[0])
    assert np.array_equal(stored["blk.24.attn_k.weight"], stored["blk.0.attn_k.weight"])
    assert stored["altup_proj.weight"].shape == (3, 64, 64)
    embeddings = stored["per_layer_token_embd.weight"]
    assert len(embeddings) == VOCABULARY
    assert np.array_equal(embeddings[-20:], np.tile(embeddings[0], (20, 1)))  # of images and sound


def test_heads_of_values_are_in_ggmls_order(tmp_path: Path) -> None:
    save_family("qwen35", tmp_path / "model")
    stored = stored_tensors(write_gguf(tmp_path / "model", tmp_path / "work", level="f32")[0])
    model = load_file(tmp_path / "model" / "model.safetensors")
    prefix = "model.layers.0.linear_attn."
    order = [0, 3, 1, 4, 2, 5]  # three heads of values for each of two heads of keys
    beta = model[f"{prefix}in_proj_b.weight"].numpy()
    assert np.array_equal(stored["blk.0.ssm_beta.weight"], beta[order])
    decay = -np.exp(model[f"{prefix}A_log"].double().numpy())
    assert np.allclose(stored["blk.0.ssm_a"], decay[order], rtol=1e-6)
    assert np.array_equal(stored["blk.0.ssm_norm.weight"], model[f"{prefix}norm.weight"].numpy())  # without 1
    norm = model["model.layers.0.input_layernorm.weight"].numpy() + 1
    assert np.array_equal(stored["blk.0.attn_norm.weight"], norm)


def test_importance_has_the_order_of_the_files_columns(tmp_path: Path) -> None:
    save_family("qwen35", tmp_path / "model")
    name = "model.layers.0.linear_attn.out_proj.weight"
    (tmp_path / "importance").mkdir()
    measured = {name: torch.arange(1.0, 97.0), name.replace("out_proj", "in_proj_qkv"): torch.ones(64)}
    save_file(measured, tmp_path / "importance" / "importance.safetensors")
    found = read_importance(tmp_path / "importance", plan_file(tmp_path / "model").tensors)
    assert found.keys() == {"blk.0.ssm_out.weight", "blk.0.attn_qkv.weight"}
    assert found["blk.0.ssm_out.weight"][::16].tolist() == [1, 49, 17, 65, 33, 81]  # heads are 16 wide


def test_a_text_can_go_on_in_another_way(tmp_path: Path) -> None:
    """A state cannot be cut back, so that tokens are computed again."""
    model = save_family("lfm2", tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    served = GGUFModel(Llama(), file, threads=1, stored="")
    served.prepare_comparison()

    def compute(tokens: list[int], start: int, past: Any) -> tuple[np.ndarray, Any]:
        places = np.arange(start, start + len(tokens))[None]
        step = Step(np.array([tokens]), np.ones((1, start + len(tokens)), int), places, past)
        logits, cache = served.forward(step)
        return torch.log_softmax(torch.from_numpy(logits[0]).double(), -1).numpy(), cache

    _, begun = compute(_TOKENS[:10], 0, None)
    compute(_TOKENS[10:20], 10, begun)
    other, _ = compute([7, 8, 9], 10, begun)
    assert np.abs(other - torch_distributions(model, [*_TOKENS[:10], 7, 8, 9])[10:]).max() < 2e-5


def test_a_model_that_takes_images_is_delivered_without_that_part(tmp_path: Path) -> None:
    save_family("qwen3vl", tmp_path / "model")
    file, ctx = write_gguf(tmp_path / "model", tmp_path / "work")
    fields = file_fields(file)
    assert fields["general.architecture"] == "qwen3vl"
    assert fields["qwen3vl.rope.dimension_sections"] == [6, 5, 5, 0]
    assert fields["qwen3vl.n_deepstack_layers"] == 1
    assert ctx.facts["parts"] == ["text"]
    assert ctx.facts["tensors_of_other_parts"] == 27
    [warning] = ctx.facts["warnings"]
    assert "text part alone" in warning
    assert "no preprocessor_config.json" in warning
    assert "model.visual." in warning
    assert not any("visual" in name for name in stored_tensors(file))


def test_what_llama_cpp_rounds_is_said(tmp_path: Path) -> None:
    model = save_family("gpt-oss-yarn", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["rope_parameters"]["truncate"] = False
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    file, ctx = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    [warning] = ctx.facts["warnings"]
    assert "truncate" in warning
    assert np.abs(llama_distributions(file, _TOKENS) - torch_distributions(model, _TOKENS)).max() < 2e-5


@pytest.mark.slow
def test_a_text_beyond_a_chunk_is_attended_to_as_transformers_does(tmp_path: Path) -> None:
    """llama.cpp has no key for Llama 4's chunks of 8192 tokens, nor for how attention grows behind them."""
    model = save_family("llama4-experts", tmp_path / "model")
    tokens = np.random.default_rng(4).integers(3, VOCABULARY - 20, 8192 + 16).tolist()
    expected = torch_distributions(model, tokens)
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    assert np.abs(llama_distributions(file, tokens, at_once=8200) - expected).max() < 1e-4
    for layer in model.model.layers:
        layer.self_attn.attn_temperature_tuning = False
    without = np.abs(torch_distributions(model, tokens) - expected).max(-1)
    assert without[:8191].max() == 0.0
    assert without[8191:].max() > 2e-3  # so attention grows
    assert (
        np.abs(torch_distributions(model, tokens[8192:]) - expected[8192:]).max() > 0.1
    )  # and a layer sees all chunks


_HYBRID = Sizes("lfm2", layers=16, heads=32, kv_heads=0, experts=0, tied=True, with_values=(2, 5, 8, 10, 12, 14))


_NEMOTRON = Sizes("nemotron_h", 8, 32, 0, 0, tied=False, with_values=(3,), with_down=(1, 4, 6))


@pytest.mark.parametrize(
    ("level", "name", "sizes", "kind"),
    [
        ("f16", "blk.0.ssm_conv1d.weight", _HYBRID, "F32"),
        ("q4_k_m", "blk.0.shortconv.conv.weight", _HYBRID, "F32"),
        ("q4_k_m", "blk.0.shortconv.in_proj.weight", _HYBRID, "Q4_K"),
        ("q4_k_m", "blk.0.ssm_norm.weight", _HYBRID, "F32"),
        ("q4_k_m", "blk.0.ssm_a", _HYBRID, "F32"),
        ("q4_k_m", "blk.0.ssm_alpha.weight", _HYBRID, "Q4_K"),
        ("q4_k_m", "blk.2.attn_v.weight", _HYBRID, "Q4_K"),  # the first of six, and none is in the first eighth
        ("q4_k_m", "blk.8.attn_v.weight", _HYBRID, "Q6_K"),  # the third
        ("q4_k_m", "blk.14.attn_v.weight", _HYBRID, "Q6_K"),  # the last
        (
            "iq4_xs",
            "blk.2.attn_v.weight",
            _HYBRID,
            "IQ4_XS",
        ),  # llama.cpp reads the heads of the first layer, which has none
        ("q4_k_m", "per_layer_token_embd.weight", _HYBRID, "Q6_K"),
        ("q4_k_m", "per_layer_model_proj.weight", _HYBRID, "F16"),
        ("q4_k_m", "blk.1.ffn_down.weight", _NEMOTRON, "Q6_K"),  # the first of three, and eight layers are counted
        ("q4_k_m", "blk.4.ffn_down.weight", _NEMOTRON, "Q4_K"),
        ("q4_k_m", "blk.6.ffn_down.weight", _NEMOTRON, "Q4_K"),
    ],
)
def test_types_in_models_of_several_kinds_of_layers(level: str, name: str, sizes: Sizes, kind: str) -> None:
    shape = (1024,) if name.endswith("ssm_a") else (64, 1024)
    assert stored_kind(name, shape, LEVELS[level], sizes).name == kind
