"""Decoders by their configuration: the defaults of classes, sizes, how far layers look back, rotary embeddings."""

from __future__ import annotations

import importlib
import inspect
import re
from operator import attrgetter
from typing import Any

import pytest
import transformers

from slipway.errors import GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway.model.decoders.classes import CLASSES
from slipway.model.decoders.decoder import FULL, LOCAL, Decoder, decoder_of, kinds_of_layers
from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed
from slipway.model.decoders.layers import layer_kinds
from slipway.model.decoders.values import ConfigValues
from slipway_gguf import architectures as gguf
from slipway_tensorrt_llm.models import table as tensorrt_llm

VALUES = ConfigValues(GGUFExportError)
SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 48, "vocab_size": 96}
KINDS = {each.class_name: each.kind for each in gguf.ARCHITECTURES if not each.reading} | CLASSES
"""Every class that a format describes; those that one format alone writes stand in its own table."""
OTHER = DecoderClass("a class of which nothing is said")
_IN_ROPE_PARAMETERS = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor")


def configuration(name: str) -> Any:
    """The class of transformers for the configuration of a decoder's class."""
    stem = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").removesuffix("ForConditionalGeneration")
    return getattr(transformers, f"{stem}TextConfig", None) or getattr(transformers, f"{stem}Config")


def decoder(name: str, **settings: Any) -> Decoder:
    config = ModelConfig({"architectures": [name], **SIZES, "num_key_value_heads": 2, **settings})
    return decoder_of(config, VALUES, KINDS[name])


def test_a_class_is_here_if_several_formats_write_it() -> None:
    tables = [{each.class_name for each in table.ARCHITECTURES} for table in (gguf, tensorrt_llm)]
    assert CLASSES.keys() == set.intersection(*tables)


@pytest.mark.parametrize("name", KINDS)
def test_defaults_are_those_of_the_class_of_transformers(name: str) -> None:
    settings = configuration(name)()
    settings.allow_global_per_layer_attribute_access = True  # sizes that some layers have otherwise
    names = {usual: own for own, usual in KINDS[name].names.items()}
    stated = [key for key in KINDS[name].defaults if key not in _IN_ROPE_PARAMETERS]
    expected = {key: getattr(settings, names.get(key, key)) for key in stated}
    assert {key: value for key, value in KINDS[name].defaults.items() if key in expected} == expected
    if rotary := getattr(settings, "rope_parameters", None):
        found = decoder(name).rotary
        assert found.share == rotary.get("full_attention", rotary).get("partial_rotary_factor", 1.0)
        assert found.base == rotary.get("full_attention", rotary)["rope_theta"]
        assert found.local_base == rotary.get("sliding_attention", {}).get("rope_theta", found.local_base)


@pytest.mark.parametrize(
    "more", [{}, {"max_window_layers": 0}, {"max_window_layers": 3}, {"max_window_layers": 99}], ids=range(4)
)
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.windowed is not Windowed.NEVER])
def test_the_layers_with_a_window_are_those_of_the_class_of_transformers(name: str, more: dict[str, int]) -> None:
    layers, given = 13, {**more, "sliding_window": 8, "use_sliding_window": True}
    settings = configuration(name)(num_hidden_layers=layers, **given)
    kinds = getattr(settings, "layer_types", None) if KINDS[name].local is not Local.ALL else None
    expected = kinds or [LOCAL] * layers  # a class without kinds of layers has the window in all
    found = decoder(name, num_hidden_layers=layers, **given)
    assert kinds_of_layers(found.kind, found.settings, VALUES, layers) == expected
    reach = found.windows or [found.positions] * layers
    assert [LOCAL if each == 8 else FULL for each in reach] == expected


def test_only_classes_whose_attention_reads_kinds_of_layers_read_them_here() -> None:
    for name, kind in KINDS.items():
        if name.endswith("ForConditionalGeneration"):
            continue  # other parts of such a model read kinds of layers too
        module = importlib.import_module(configuration(name).__module__.replace("configuration_", "modeling_"))
        reads = re.search(r"\b(layer_types|layers_block_type)\b", inspect.getsource(module)) is not None
        assert reads == (kind.by_layer or (kind.windowed is not Windowed.NEVER and kind.local is not Local.ALL)), name


@pytest.mark.parametrize(
    ("name", "settings", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, ()),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": 8, "max_position_embeddings": 8}, ()),
        ("Qwen3ForCausalLM", {"sliding_window": 8}, ()),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, ()),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (32768, 32768, 32768, 8),
        ),
        ("Qwen3MoeForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (8, 8, 8, 8)),
        ("Phi3ForCausalLM", {"sliding_window": 8, "layer_types": [LOCAL, FULL, FULL, FULL]}, (8, 8, 8, 8)),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": [FULL, FULL, LOCAL, FULL]},
            (32768, 32768, 8, 32768),
        ),
        ("Gemma2ForCausalLM", {"sliding_window": 8}, (8, 8192, 8, 8192)),
    ],
    ids=range(12),
)
def test_how_far_layers_look_back(name: str, settings: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert decoder(name, **settings).windows == windows


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta"),
    ],
    ids=range(5),
)
def test_settings_that_no_model_can_have_are_named(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(GGUFExportError, match=f"^{key} is ") as caught:
        decoder("MistralForCausalLM", **settings)
    assert caught.value.reason == "BASE_MODEL_INVALID"


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({}, None),
        ({"attention_factor": 1.1386294}, None),
        ({"attention_factor": 1.5}, ("attention_factor", 1.5)),
        ({"mscale": 0.7}, ("mscale", 0.7)),
        ({"mscale": 1.0}, None),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, ("mscale", 1.0)),
        ({"mscale_all_dim": 1.0}, ("mscale_all_dim", 1.0)),
        ({"truncate": False}, ("truncate", False)),
        ({"truncate": True}, None),
    ],
    ids=range(9),
)
def test_yarn_is_that_of_the_paper_or_names_what_differs(more: dict[str, Any], fault: tuple[str, Any] | None) -> None:
    rotary = decoder("LlamaForCausalLM", rope_parameters={"rope_type": "yarn", "factor": 4.0, **more}).rotary
    assert rotary.beyond_yarn() == fault


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"layer_types": [LOCAL]}, "layer_types"),
        ({"layer_types": "local"}, "layer_types"),
        ({"max_window_layers": "many"}, "max_window_layers"),
        ({"max_window_layers": True}, "max_window_layers"),
    ],
    ids=range(4),
)
def test_kinds_of_layers_that_no_model_can_have_are_named(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(GGUFExportError, match=f"^{key} is "):
        decoder("Qwen3ForCausalLM", sliding_window=8, use_sliding_window=True, **settings)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.windowed is Windowed.ASKED])
def test_settings_of_windows_do_not_matter_without_one(name: str) -> None:
    unused = {"max_window_layers": None, "no_rope_layer_interval": 0, "layer_types": "none"}
    assert decoder(name, use_sliding_window=False, sliding_window=8, **unused).windows == ()


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("BambaConfig", {"attn_layer_indices": [2, 5]}),
        ("FalconH1Config", {}),
        ("Gemma3nTextConfig", {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None}),
        ("Gemma4TextConfig", {}),
        ("GptOssConfig", {}),
        ("GraniteMoeHybridConfig", {}),
        ("GraniteMoeHybridConfig", {"layer_types": ["mamba", "attention"] * 4 + ["mamba"]}),
        ("JambaConfig", {}),
        ("Lfm2Config", {"full_attn_idxs": [1, 4]}),
        ("Lfm2Config", {}),
        ("Lfm2MoeConfig", {"layer_types": ["conv", "full_attention", "conv"] * 3}),
        ("Llama4TextConfig", {}),
        ("Llama4TextConfig", {"no_rope_layer_interval": 3}),
        ("Llama4TextConfig", {"no_rope_layers": [1, 0, 1] * 3}),
        ("Mamba2Config", {}),
        ("NemotronHConfig", {"hybrid_override_pattern": "M*-EM*-EM"}),
        ("Qwen3_5TextConfig", {}),
        ("Qwen3_5MoeTextConfig", {"full_attention_interval": 3}),
        ("Qwen3NextConfig", {}),
        ("RecurrentGemmaConfig", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "given"])
def test_kinds_of_layers_are_what_transformers_says(config: str, settings: dict[str, Any], saved: bool) -> None:
    """As transformers saves the configuration, and as older files give the settings."""
    found = getattr(transformers, config)(num_hidden_layers=9, **settings)
    given = found.to_dict() if saved else {"model_type": found.model_type, "num_hidden_layers": 9, **settings}
    name = config.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    assert layer_kinds(ModelConfig(given), KINDS.get(name, OTHER)) == tuple(found.layer_types)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}, (FULL,) * 2),
        ({"architectures": ["GPT2LMHeadModel"], "n_layer": 1}, (FULL,)),
        (
            {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2, "layer_types": [FULL] * 2},
            (LOCAL,) * 2,
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2},
            (LOCAL, FULL),
        ),
        (
            {"model_type": "gemma4_text", "layer_types": [LOCAL, FULL, LOCAL]},
            (LOCAL, FULL, LOCAL),
        ),
        (
            {"model_type": "x", "text_config": {"model_type": "falcon_h1", "num_hidden_layers": 1}},
            ("hybrid",),
        ),
        ({"layer_types": ["compressed_sparse_attention"]}, ("compressed_sparse_attention",)),
        ({"model_type": "llama"}, ()),
        ({"model_type": "gemma4_text"}, ()),
        ({"num_hidden_layers": "x"}, ()),
    ],
    ids=range(10),
)
def test_kinds_of_layers_by_settings(settings: dict[str, Any], kinds: tuple[str, ...]) -> None:
    config = ModelConfig(settings)
    assert layer_kinds(config, KINDS.get(config.class_name, OTHER)) == kinds


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        (
            "GPTNeoXForCausalLM",
            {"rotary_pct": 0.5, "rotary_emb_base": 5000, "layer_norm_eps": 1e-6},
            {"rotary.share": 0.5, "rotary.base": 5000.0, "kv_heads": 4},
        ),
        ("BloomForCausalLM", {"n_embed": 32}, {"hidden": 32, "positions": 2048, "kv_heads": 4}),
        ("BloomForCausalLM", {"seq_length": 512}, {"hidden": 24, "positions": 512}),
        ("MptForCausalLM", {"d_model": 32, "n_heads": 8, "n_layers": 3}, {"hidden": 32, "heads": 8, "layers": 3}),
        ("FalconForCausalLM", {"num_kv_heads": 2, "ffn_hidden_size": 40}, {"kv_heads": 1, "inner": 40}),
        ("FalconForCausalLM", {"num_kv_heads": 2, "new_decoder_architecture": True}, {"kv_heads": 2}),
        ("FalconForCausalLM", {"multi_query": False}, {"kv_heads": 4}),
        ("GPTBigCodeForCausalLM", {}, {"kv_heads": 1}),
        ("GPTBigCodeForCausalLM", {"multi_query": False}, {"kv_heads": 4}),
    ],
    ids=range(9),
)
def test_settings_with_another_name_have_the_usual_meaning(
    name: str, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = decoder(name, **settings)
    assert {key: attrgetter(key)(found) for key in expected} == expected


def test_a_fixed_alpha_stretches_the_base() -> None:
    scaled = decoder("HunYuanDenseV1ForCausalLM", head_dim=8, rope_parameters={"rope_type": "dynamic", "alpha": 8.0})
    assert scaled.rotary.stretched_base() == pytest.approx(10_000.0 * 8 ** (8 / 6))
    assert decoder("LlamaForCausalLM").rotary.stretched_base() == 10_000.0


def test_a_number_of_turned_values_is_a_share_of_the_head() -> None:
    found = decoder("MiniMaxM2ForCausalLM", head_dim=8, rotary_dim=4).rotary
    assert (found.share, found.rotated) == (0.5, 4)


def test_a_number_of_turned_values_counts_only_for_classes_that_read_it() -> None:
    for name in (each for each, kind in KINDS.items() if not kind.turned):
        given = {"head_dim": 8, KINDS[name].width: 8}
        assert decoder(name, **given, rotary_dim=4).rotary.share == decoder(name, **given).rotary.share, name
        settings = inspect.getsource(configuration(name))
        assert "rotary_dim" not in settings, name
