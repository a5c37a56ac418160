"""Settings and tensors of recent models that llama.cpp computes otherwise, or that a file would lose, are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.errors import AdapterExportError, GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway_gguf.architectures import architecture_of, refusal_reason, text_part
from slipway_gguf.metadata import field_of, parameters_of
from slipway_gguf.weights.header import header
from slipway_gguf.weights.tensors import plan_file
from support.models.gguf_families import FAMILIES, settings_of
from support.models.gguf_models import edit_model, save_adapter, save_family, write_adapter, write_gguf

pytestmark = pytest.mark.own_process


Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("family", "settings", "key"),
    [(name, settings, key) for name, each in FAMILIES.items() for settings, key in each.refused],
    ids=str,
)
def test_settings_that_llama_cpp_computes_otherwise_are_refused(
    family: str, settings: dict[str, Any], key: str
) -> None:
    config = settings_of(family)
    assert refusal_reason(ModelConfig(config)) == ""
    assert refusal_reason(ModelConfig({**config, **settings})).startswith(f"{key} is ")


@pytest.mark.parametrize(
    ("family", "settings"),
    [(name, settings) for name, each in FAMILIES.items() for settings in each.taken],
    ids=str,
)
def test_settings_that_mean_what_llama_cpp_computes_are_taken(family: str, settings: dict[str, Any]) -> None:
    assert refusal_reason(ModelConfig({**settings_of(family), **settings})) == ""


@pytest.mark.parametrize(
    "family", ["falcon-h1", "nemotron_h_moe", "gemma4", "qwen3vl", "deepseek2", "llama4-text-part", "jamba"]
)
def test_no_value_of_a_setting_is_a_fault_of_the_program(family: str) -> None:
    settings = settings_of(family)
    for part in (settings, settings.get("text_config", {})):
        for key, value in list(part.items()):
            for other in ("x", None, -1, 0, [], {}, [None], 1 << 40):
                part[key] = other
                config = ModelConfig(settings)
                own = text_part(config) or config
                found = architecture_of(own)
                if found and not refusal_reason(config):
                    with suppress(GGUFExportError):
                        parameters_of(found, own)
            part[key] = value


def test_shares_of_axes_that_are_more_than_the_frequencies_are_refused(tmp_path: Path) -> None:
    save_family("qwen3vl", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [24, 20, 20]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(GGUFExportError, match=r"^mrope_section is "):
        write_gguf(tmp_path / "model", tmp_path / "work")


@pytest.mark.parametrize(
    ("family", "module"),
    [("gemma4", "per_layer_model_projection"), ("deepseek2", "kv_b_proj"), ("deepseek2", "q_a_proj")],
)
def test_factors_that_llama_cpp_would_not_use_are_refused(family: str, module: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path / "model")
    save_adapter(model, tmp_path / "adapter", target_modules=[module])
    with pytest.raises(AdapterExportError, match=module) as caught:
        write_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "work")
    assert caught.value.reason == "ADAPTER_TENSOR_UNUSED"


def test_a_layer_that_lacks_a_tensor_of_its_kind_is_named(tmp_path: Path) -> None:
    save_family("lfm2", tmp_path / "model")
    edit_model(tmp_path / "model", lambda tensors: tensors.__delitem__("model.layers.2.conv.out_proj.weight"))
    with pytest.raises(GGUFExportError, match=r"blk\.2\.shortconv\.out_proj\.weight"):
        write_gguf(tmp_path / "model", tmp_path / "work")


def test_a_tensor_of_another_size_than_the_settings_say_is_named(tmp_path: Path) -> None:
    save_family("qwen35", tmp_path / "model")
    edit_model(tmp_path / "model", lambda _: None, linear_num_value_heads=8)
    with pytest.raises(GGUFExportError, match="linear_attn") as caught:
        write_gguf(tmp_path / "model", tmp_path / "work")
    assert caught.value.reason == "GGUF_INVALID"


def _lengthen(tensors: Tensors) -> None:
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name][:8]])


def _lose_embedding(tensors: Tensors) -> None:
    del tensors["model.embed_tokens.weight"]


def _lose_activation(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.act_fn.beta"]


def _lose_router(tensors: Tensors) -> None:
    del tensors["model.layers.3.feed_forward.router.weight"]


def _lose_norm(tensors: Tensors) -> None:
    del tensors["model.layers.2.mamba.b_layernorm.weight"]


def _lose_attention(tensors: Tensors) -> None:
    del tensors["model.layers.0.self_attn.o_proj.weight"]


def _add_beyond(tensors: Tensors) -> None:
    tensors["model.layers.77.mlp.gate.e_score_correction_bias"] = torch.zeros(8)


def _add_again(tensors: Tensors) -> None:
    tensors["language_model.model.norm.weight"] = tensors["model.language_model.norm.weight"] * 2


def _number_highly(tensors: Tensors) -> None:
    tensors[f"model.altup_projections.{10**15}.weight"] = torch.zeros(64, 64)


@pytest.mark.parametrize(
    ("family", "change", "settings", "named"),
    [
        ("qwen3next", _lengthen, {}, "in_proj_qkvz"),
        ("falcon-h1", _lose_embedding, {"tie_word_embeddings": True, "embedding_multiplier": 2.0}, "token_embd"),
        ("llama4", _lose_router, {}, "blk.3.ffn_gate_inp.weight"),
        ("jamba", _lose_norm, {}, "blk.2.ssm_b_norm.weight"),
        ("glm4moe", _lose_attention, {}, "blk.0.attn_output.weight"),
        ("glm4moe", _add_beyond, {}, "blk.77."),
        ("apertus", _lose_activation, {}, "mlp.act_fn.beta"),
        ("qwen3vl", _add_again, {}, "language_model.model.norm.weight"),
        ("gemma3n", _number_highly, {}, "altup_proj.weight"),
    ],
    ids=["rows", "no embedding", "router", "norm", "attention", "layer", "activation", "twice", "number"],
)
def test_tensors_that_would_be_lost_are_refused_by_name(
    family: str, change: Callable[[Tensors], None], settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_family(family, tmp_path)
    edit_model(tmp_path, lambda tensors: tensors.pop("lm_head.weight", None) if settings else None)
    edit_model(tmp_path, change, **settings)
    with pytest.raises(GGUFExportError, match=re.escape(named)) as caught:
        plan_file(tmp_path)
    assert caught.value.reason == "GGUF_INVALID"


@pytest.mark.parametrize(
    ("family", "settings", "key"),
    [
        ("gemma4", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 1e9}}}, "partial_rotary_factor"),
        ("gemma3n", {"vocab_size": 2**31 - 1}, "vocab_size_per_layer_input"),
    ],
)
def test_no_number_makes_a_list_without_end(family: str, settings: dict[str, Any], key: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    edit_model(tmp_path, lambda _: None, **settings)
    with pytest.raises(GGUFExportError, match=f"^{key} is ") as caught:
        plan_file(tmp_path)
    assert caught.value.reason == "BASE_MODEL_INVALID"


@pytest.mark.parametrize(
    ("value", "said"),
    [(1 << 32, "UINT32"), (-(1 << 32), "UINT32"), (1e39, "FLOAT32"), ((1, 1 << 31), "INT32")],
    ids=str,
)
def test_a_number_beyond_its_type_is_named(value: Any, said: str) -> None:
    with pytest.raises(GGUFExportError, match=rf"^llama\.context_length would be .* {said} of a GGUF file") as caught:
        header([field_of("llama.context_length", value)], [])
    assert caught.value.reason == "BASE_MODEL_INVALID"
