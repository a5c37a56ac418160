"""Models with recurrent layers, experts, parts for images and layers that predict further tokens: what a file says, leaves out and refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.errors import AdapterExportError, GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway.proof.runtime import Step
from slipway_gguf.architectures import architecture_of, refusal_reason, text_part
from slipway_gguf.metadata import parameters_of
from slipway_gguf.params import LEVELS
from slipway_gguf.runtime.llama import Llama
from slipway_gguf.runtime.model import GGUFModel
from slipway_gguf.weights.mixture import Sizes, read_importance, stored_kind
from slipway_gguf.weights.tensors import plan_file
from support.models.gguf_families import FAMILIES, VOCABULARY
from support.models.gguf_models import (
    llama_distributions,
    save_adapter,
    save_family,
    torch_distributions,
    write_adapter,
    write_gguf,
)

pytestmark = pytest.mark.own_process

_TOKENS = np.random.default_rng(3).integers(3, VOCABULARY, 24).tolist()
Tensors = dict[str, torch.Tensor]


def _fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def _stored(file: Path) -> dict[str, np.ndarray]:
    return {each.name: np.array(each.data) for each in gguf.GGUFReader(file).tensors}


def _edit(folder: Path, change: Callable[[Tensors], None], **config: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))


@cache
def _settings(family: str) -> dict[str, Any]:
    made = FAMILIES[family]()
    return {**made.config.to_dict(), "architectures": [type(made).__name__]}


_LINEAR, _FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "settings", "key"),
    [
        ("qwen35", {"linear_value_head_dim": 32}, "linear_value_head_dim"),
        ("qwen35", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ("qwen35", {"layer_types": [_FULL, _LINEAR, _LINEAR, _FULL]}, "layer_types"),
        ("qwen35", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3next", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3next", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("lfm2", {"conv_bias": True}, "conv_bias"),
        ("granitehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("granitehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("granitehybrid", {"mamba_conv_bias": False}, "mamba_conv_bias"),
        ("granite-4-attention-experts", {"position_embedding_type": "nope"}, "position_embedding_type"),
        ("falcon-h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        ("falcon-h1", {"projectors_bias": True}, "projectors_bias"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"time_step_min": 0.1}, "time_step_min"),
        ("nemotron_h_moe", {"moe_latent_size": 16}, "moe_latent_size"),
        ("nemotron_h_moe", {"layers_block_type": ["moe", "mlp", "linear_attention"]}, "layers_block_type"),
        ("glm4moe", {"n_group": 2}, "n_group"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt-oss", {"layer_types": [_FULL] * 4}, "layer_types"),
        ("deepseek2", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek2", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "mscale"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("mistral3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("gemma3n", {"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ("gemma3n", {"activation_sparsity_pattern": [0.0] * 25}, "activation_sparsity_pattern"),
        ("gemma3n", {"laurel_rank": 32}, "laurel_rank"),
        ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}}, "per_layer_config"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4", {"rope_parameters": {"full_attention": "proportional"}}, "rope_parameters"),
    ],
    ids=str,
)
def test_settings_that_llama_cpp_computes_otherwise_are_refused(
    family: str, settings: dict[str, Any], key: str
) -> None:
    config = _settings(family)
    assert refusal_reason(ModelConfig(config)) == ""
    assert refusal_reason(ModelConfig({**config, **settings})).startswith(f"{key} is ")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_an_architecture_by_its_settings_alone(family: str) -> None:
    config = ModelConfig(_settings(family))
    found = architecture_of(text_part(config) or config)
    assert found is not None
    assert refusal_reason(config) == ""
    assert found.name == {"mixtral": "llama", "gpt-oss-yarn": "gpt-oss"}.get(family, found.name)


@pytest.mark.parametrize("family", ["falcon-h1", "nemotron_h_moe", "gemma4", "qwen3vl", "deepseek2"])
def test_no_value_of_a_setting_is_a_fault_of_the_program(family: str) -> None:
    settings = _settings(family)
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


def test_a_file_says_which_layers_have_attention(tmp_path: Path) -> None:
    save_family("lfm2", tmp_path / "model")
    fields = _fields(write_gguf(tmp_path / "model", tmp_path / "work")[0])
    assert fields["lfm2.attention.head_count_kv"] == [0, 2, 0, 2]
    assert fields["lfm2.feed_forward_length"] == 64  # two thirds of 96, as the class computes
    assert fields["lfm2.shortconv.l_cache"] == 3


def test_older_names_of_kinds_of_layers_give_the_same_file(tmp_path: Path) -> None:
    save_family("granitehybrid", tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "one")
    assert _fields(file)["granitehybrid.attention.head_count_kv"] == [0, 2, 0]
    _edit(tmp_path / "model", lambda _: None, layer_types=["mamba", "attention", "mamba"])
    other, _ = write_gguf(tmp_path / "model", tmp_path / "other")
    assert other.read_bytes() == file.read_bytes()


def test_tensors_that_no_layer_uses_are_there_where_llama_cpp_wants_them(tmp_path: Path) -> None:
    save_family("gemma3n", tmp_path / "model")
    stored = _stored(write_gguf(tmp_path / "model", tmp_path / "work", level="f32")[0])
    assert np.array_equal(stored["blk.24.attn_k.weight"], stored["blk.0.attn_k.weight"])
    assert stored["altup_proj.weight"].shape == (3, 64, 64)
    embeddings = stored["per_layer_token_embd.weight"]
    assert len(embeddings) == VOCABULARY
    assert np.array_equal(embeddings[-20:], np.tile(embeddings[0], (20, 1)))  # of images and sound


def test_heads_of_values_are_in_ggmls_order(tmp_path: Path) -> None:
    save_family("qwen35", tmp_path / "model")
    stored = _stored(write_gguf(tmp_path / "model", tmp_path / "work", level="f32")[0])
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
    _edit(tmp_path / "model", add)
    file, ctx = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    fields, stored = _fields(file), _stored(file)
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
    _edit(tmp_path / "model", add)
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
    _edit(tmp_path, add)
    plan_file(tmp_path)
    _edit(tmp_path, lambda tensors: tensors.__delitem__(lost))
    with pytest.raises(GGUFExportError, match=re.escape(f"the multi-token head has no tensor for {named!r}")) as caught:
        plan_file(tmp_path)
    assert caught.value.reason == "GGUF_INVALID"


def test_a_model_that_takes_images_is_delivered_without_that_part(tmp_path: Path) -> None:
    save_family("qwen3vl", tmp_path / "model")
    file, ctx = write_gguf(tmp_path / "model", tmp_path / "work")
    fields = _fields(file)
    assert fields["general.architecture"] == "qwen3vl"
    assert fields["qwen3vl.rope.dimension_sections"] == [6, 5, 5, 0]
    assert fields["qwen3vl.n_deepstack_layers"] == 1
    assert ctx.facts["parts"] == ["text"]
    assert ctx.facts["tensors_of_other_parts"] == 27
    [warning] = ctx.facts["warnings"]
    assert "text part alone" in warning
    assert "no preprocessor_config.json" in warning
    assert "model.visual." in warning
    assert not any("visual" in name for name in _stored(file))


def test_shares_of_axes_that_are_more_than_the_frequencies_are_refused(tmp_path: Path) -> None:
    save_family("qwen3vl", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [24, 20, 20]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(GGUFExportError, match=r"^mrope_section is "):
        write_gguf(tmp_path / "model", tmp_path / "work")


def test_what_llama_cpp_rounds_is_said(tmp_path: Path) -> None:
    model = save_family("gpt-oss-yarn", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["rope_parameters"]["truncate"] = False
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    file, ctx = write_gguf(tmp_path / "model", tmp_path / "work", level="f32")
    [warning] = ctx.facts["warnings"]
    assert "truncate" in warning
    assert np.abs(llama_distributions(file, _TOKENS) - torch_distributions(model, _TOKENS)).max() < 2e-5


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
    _edit(tmp_path / "model", lambda tensors: tensors.__delitem__("model.layers.2.conv.out_proj.weight"))
    with pytest.raises(GGUFExportError, match=r"blk\.2\.shortconv\.out_proj\.weight"):
        write_gguf(tmp_path / "model", tmp_path / "work")


def test_a_tensor_of_another_size_than_the_settings_say_is_named(tmp_path: Path) -> None:
    save_family("qwen35", tmp_path / "model")
    _edit(tmp_path / "model", lambda _: None, linear_num_value_heads=8)
    with pytest.raises(GGUFExportError, match="linear_attn") as caught:
        write_gguf(tmp_path / "model", tmp_path / "work")
    assert caught.value.reason == "GGUF_INVALID"


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


def _lengthen(tensors: Tensors) -> None:
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name][:8]])


def _lose_embedding(tensors: Tensors) -> None:
    del tensors["model.embed_tokens.weight"]


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
        ("glm4moe", _add_beyond, {}, "blk.77."),
        ("qwen3vl", _add_again, {}, "language_model.model.norm.weight"),
        ("gemma3n", _number_highly, {}, "altup_proj.weight"),
    ],
    ids=["rows", "no embedding", "layer", "twice", "number"],
)
def test_tensors_that_would_be_lost_are_refused_by_name(
    family: str, change: Callable[[Tensors], None], settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_family(family, tmp_path)
    _edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight", None) if settings else None)
    _edit(tmp_path, change, **settings)
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
    _edit(tmp_path, lambda _: None, **settings)
    with pytest.raises(GGUFExportError, match=f"^{key} is ") as caught:
        plan_file(tmp_path)
    assert caught.value.reason == "BASE_MODEL_INVALID"
