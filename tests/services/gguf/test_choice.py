"""What is decided without weights: types of tensors, refusals, tasks and names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="names types: pip install 'slipway-ml[gguf]'")
from slipway.configuration import parse
from slipway.errors import GGUFExportError
from slipway.formats.tasks import FormatRequest, PlannedTask
from slipway.model.configuration import ModelConfig
from slipway.model.decoders.decoder import decoder_of
from slipway.planning.plan import plan
from slipway_gguf.architectures import architecture_of, refusal_reason
from slipway_gguf.format import GGUFConfiguration
from slipway_gguf.metadata import CONFIG_VALUES, rope_of
from slipway_gguf.params import LEVELS, GGUFParams
from slipway_gguf.weights.ggml import library
from slipway_gguf.weights.mixture import Sizes, stored_kind

_TIED = Sizes("qwen3", layers=28, heads=16, kv_heads=8, experts=0, tied=True)
_QWEN_72B = Sizes("qwen2", layers=80, heads=64, kv_heads=8, experts=0, tied=False)
_FALCON = Sizes("falcon", layers=32, heads=71, kv_heads=1, experts=0, tied=True)
_MIXTRAL = Sizes("llama", layers=32, heads=32, kv_heads=8, experts=8, tied=False)


@pytest.mark.parametrize(
    ("level", "name", "columns", "sizes", "kind"),
    [
        ("q4_k_m", "token_embd.weight", 1024, _TIED, "Q6_K"),
        ("q4_k_m", "blk.0.attn_q.weight", 1024, _TIED, "Q4_K"),
        ("q4_k_m", "blk.0.attn_v.weight", 1024, _TIED, "Q6_K"),
        ("q4_k_m", "blk.3.attn_v.weight", 1024, _TIED, "Q4_K"),
        ("q4_k_m", "blk.5.ffn_down.weight", 3072, _TIED, "Q6_K"),
        ("q4_k_m", "blk.27.ffn_down.weight", 3072, _TIED, "Q6_K"),
        ("q4_k_m", "blk.4.ffn_down.weight", 3072, _TIED, "Q4_K"),
        ("q4_k_m", "blk.4.ffn_down.weight", 96, _TIED, "Q5_0"),
        ("q4_k_m", "blk.5.ffn_down.weight", 96, _TIED, "Q8_0"),
        ("q4_k_m", "blk.4.ffn_down.weight", 40, _TIED, "F16"),
        ("q4_k_m", "blk.4.attn_norm.weight", 1024, _TIED, "F32"),
        ("q4_k_m", "blk.11.attn_v.weight", 8192, _QWEN_72B, "Q5_K"),
        ("q4_k_m", "blk.4.attn_v.weight", 4096, _MIXTRAL, "Q8_0"),
        ("q4_k_m", "blk.4.attn_output.weight", 4096, _MIXTRAL, "Q5_K"),
        ("q4_k_m", "token_embd.weight", 4096, _MIXTRAL, "Q4_K"),
        ("q4_k_m", "output.weight", 4096, _MIXTRAL, "Q6_K"),
        ("q4_k_m", "blk.4.ffn_gate_inp.weight", 4096, _MIXTRAL, "F32"),
        ("q4_k_m", "token_embd.weight", 4544, _FALCON, "Q8_0"),
        ("q4_k_m", "blk.1.ffn_down.weight", 18176, _FALCON, "Q6_K"),
        ("q4_k_m", "blk.2.ffn_down.weight", 18176, _FALCON, "Q5_K"),
        ("q4_k_m", "blk.4.ffn_down.weight", 18176, _FALCON, "Q4_K"),
        ("q5_k_m", "blk.2.ffn_down.weight", 18176, _FALCON, "Q6_K"),
        ("iq4_xs", "blk.0.ffn_down.weight", 3072, _TIED, "Q5_K"),
        ("iq4_xs", "blk.9.ffn_down.weight", 96, _TIED, "IQ4_NL"),
        ("q4_0", "token_embd.weight", 1024, _TIED, "Q6_K"),
        ("q8_0", "token_embd.weight", 1024, _TIED, "Q8_0"),
        ("f16", "token_embd.weight", 1024, _TIED, "F16"),
        ("f16", "position_embd.weight", 1024, _TIED, "F32"),
    ],
)
def test_types_are_those_of_llama_cpps_quantizer(level: str, name: str, columns: int, sizes: Sizes, kind: str) -> None:
    shape = (columns,) if "norm" in name else (64, columns)
    assert stored_kind(name, shape, LEVELS[level], sizes).name == kind


_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 2, "hidden_size": 2304}


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("LlamaForCausalLM", {}, ""),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": True}, ""),
        ("Gemma2ForCausalLM", _GEMMA, ""),
        ("Gemma3ForCausalLM", _GEMMA, ""),
        ("BertForMaskedLM", {}, "LlamaForCausalLM"),
        ("PhimoeForCausalLM", {}, "shares a weight of 1 between the two experts"),
        ("BitNetForCausalLM", {}, "with SiLU"),
        ("LlamaForSequenceClassification", {"model_type": "llama"}, "sequence classifier"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("Qwen2MoeForCausalLM", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("Gemma2ForCausalLM", {**_GEMMA, "attn_logit_softcapping": None}, "attn_logit_softcapping"),
        ("Gemma3ForCausalLM", {**_GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("Gemma3ForCausalLM", {**_GEMMA, "query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
        ("Gemma3ForCausalLM", {**_GEMMA, "layer_types": ["full_attention"] * 2}, "layer_types"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 0]}, "no_rope_layers"),
        ("GPT2LMHeadModel", {"activation_function": "relu"}, "activation_function"),
    ],
    ids=range(17),
)
def test_models_that_llama_cpp_computes_otherwise_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    reason = refusal_reason(ModelConfig({"architectures": [name], "vocab_size": 8, **settings}))
    assert words in reason
    assert bool(reason) == bool(words)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads"])
@pytest.mark.parametrize("value", ["x", None, 0, [1]])
def test_a_wrong_size_of_the_largest_gemma_is_refused_by_name(key: str, value: object) -> None:
    settings = {**_GEMMA, "num_hidden_layers": 46, "num_attention_heads": 32, key: value}
    assert key in refusal_reason(ModelConfig({"architectures": ["Gemma2ForCausalLM"], **settings}))


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("name", "key", "given"),
    [
        ("Qwen3ForCausalLM", "rope_theta", {"rope_theta": -1.0}),
        ("Qwen3ForCausalLM", "rope_theta", {"rope_theta": 0}),
        ("Qwen3ForCausalLM", "factor", {"rope_type": "linear", "factor": 0}),
        ("Qwen3ForCausalLM", "factor", {"rope_type": "yarn", "factor": -1}),
        ("LlamaForCausalLM", "factor", {**_LLAMA3, "factor": 0.0, "original_max_position_embeddings": 32}),
        ("LlamaForCausalLM", "high_freq_factor", {**_LLAMA3, "high_freq_factor": -4.0}),
        ("LlamaForCausalLM", "original_max_position_embeddings", {**_LLAMA3, "original_max_position_embeddings": 1}),
        ("Phi3ForCausalLM", "original_max_position_embeddings", {**_LONGROPE, "original_max_position_embeddings": 1}),
        ("Phi3ForCausalLM", "short_factor", {**_LONGROPE, "short_factor": [1.0, 0.0, 1.0, 1.0]}),
        ("Phi3ForCausalLM", "long_factor", {**_LONGROPE, "long_factor": [1.0, float("nan"), 1.0, 1.0]}),
    ],
    ids=range(10),
)
def test_numbers_of_the_rotary_embedding_are_above_zero(name: str, key: str, given: dict[str, Any]) -> None:
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_hidden_layers": 1,
    }
    config = ModelConfig(
        {"architectures": [name], "vocab_size": 8, "max_position_embeddings": 64, "rope_parameters": given, **sizes}
    )
    found = architecture_of(config)
    assert found is not None
    with pytest.raises(GGUFExportError, match=f"^{key} is ") as caught:
        rope_of(found, decoder_of(config, CONFIG_VALUES, found.kind))
    assert caught.value.reason == "BASE_MODEL_INVALID"


def test_a_wheel_without_its_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xllamacpp").mkdir()
    (tmp_path / "xllamacpp" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "xllamacpp", raising=False)
    with pytest.raises(GGUFExportError, match="xllamacpp is installed without its library") as caught:
        library.__wrapped__()
    assert caught.value.reason == "UNSUPPORTED"


def _planned(*, calibration: str = "", **section: Any) -> tuple[PlannedTask, ...]:
    formats = {"pytorch": {"enabled": False}, "onnx": {"enabled": False}, "gguf": {"enabled": True, **section}}
    export = {
        "checkpoint": {"path": "runs/my model/checkpoint-40"},
        "base_model": {"name": "hf://Qwen/Qwen3-0.6B@main"},
        "formats": formats,
        "validation": {"enabled": False},
        "optimization": {"calibration": calibration},
    }
    return plan(parse(export), ("base", "adapter", *(["calibration"] if calibration else [])))


def _tasks(**section: Any) -> dict[str, Any]:
    return {task.format: dict(task.params) for task in _planned(**section) if task.format}


def test_each_level_is_a_file_of_the_merged_model() -> None:
    tasks = _tasks(quantization=["q8_0", "q4_k_m"])
    assert {name: task["type"] for name, task in tasks.items()} == {
        "gguf": "f16",
        "gguf-q8_0": "q8_0",
        "gguf-q4_k_m": "q4_k_m",
    }
    assert {(task["name"], task["base_model"]) for task in tasks.values()} == {("my-model", "Qwen/Qwen3-0.6B")}


def test_f16_in_the_list_is_the_unquantized_file() -> None:
    assert set(_tasks(quantization=["f16", "q8_0"])) == {"gguf", "gguf-q8_0"}
    assert set(_tasks(quantization=["f16"], unquantized=False)) == {"gguf"}
    assert set(_tasks(quantization=["q8_0"], unquantized=False)) == {"gguf-q8_0"}


def test_a_file_that_nobody_asked_for_is_not_written() -> None:
    assert [task.id for task in _planned(quantization=["q4_k_m"], unquantized=False)] == ["merge", "gguf-q4_k_m"]


def test_text_that_the_export_names_weighs_the_rounding() -> None:
    planned = {task.id: task for task in _planned(calibration="text", quantization=["q8_0", "q4_k_m"])}
    assert planned["importance"].fallback
    assert planned["gguf-q4_k_m"].inputs["importance"] == planned["importance"].reference
    assert {"importance"} & (set(planned["gguf"].inputs) | set(planned["gguf-q8_0"].inputs)) == set()
    assert "importance" not in {task.id for task in _planned(quantization=["q4_k_m"])}
    assert "importance" not in {task.id for task in _planned(calibration="text", quantization=["q8_0"])}


def test_levels_of_other_formats_name_the_nearest_of_this_one() -> None:
    with pytest.raises(Exception, match="q4_k_m"):
        _tasks(quantization=["int4"])


@pytest.mark.parametrize(
    ("name", "safe"),
    [("my model", "my-model"), ("../../x", "x"), ("", "model"), ("Ä" * 9, "model"), ("a" * 99, "a" * 80)],
)
def test_names_are_safe_as_files(name: str, safe: str) -> None:
    request = FormatRequest("gguf", GGUFConfiguration(), (), "task:merge/pytorch", model_name=name)
    assert GGUFParams(name=request.file_name).name == safe


def test_unsafe_names_and_unknown_types_are_refused() -> None:
    with pytest.raises(ValueError, match="not safe as a file name"):
        GGUFParams(name="../x")
    with pytest.raises(ValueError, match="not a type of weights"):
        GGUFParams(type="q9")
