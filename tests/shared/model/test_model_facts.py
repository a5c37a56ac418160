"""What transformers says of a model's class, and how it is told when it cannot say anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipway.model.folder import ModelFolder
from slipway.model.model_facts import CannotBuildError, check_loadable, model_facts
from support.models.tiny_models import describe_a_layer_more, make_base


def write_config(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_ties_and_shapes_of_a_model(tmp_path: Path) -> None:
    facts = model_facts(ModelFolder.open(make_base(tmp_path / "base")))
    assert facts.groups() == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert facts.shapes["model.layers.1.mlp.down_proj.weight"] == (64, 128)
    assert facts.transposed == frozenset()
    assert {parameter.device.type for parameter in facts.model.parameters()} == {"meta"}


def test_transposed_layers_are_known(tmp_path: Path) -> None:
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    folder = write_config(tmp_path / "base", model_type="gpt2", architectures=["GPT2LMHeadModel"], **gpt2)
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert model_facts(ModelFolder.open(folder)).transposed == {f"transformer.h.0.{layer}.weight" for layer in layers}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "qwen3"}, "names no class"),
        ({"model_type": "qwen3", "architectures": ["QwenOfTomorrow"]}, "QwenOfTomorrow"),
        ({"model_type": "model-of-tomorrow"}, "model-of-tomorrow"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": "wide"}, "hidden_size"),
    ],
    ids=["no-class", "unknown-class", "unknown-type", "impossible-setting"],
)
def test_what_is_in_the_way_is_said_in_a_line(tmp_path: Path, config: dict[str, object], said: str) -> None:
    with pytest.raises(CannotBuildError, match=said) as caught:
        model_facts(ModelFolder.open(write_config(tmp_path / "base", **config)))
    assert "\n" not in str(caught.value)


def test_a_model_much_larger_than_its_weights_is_not_loaded(tmp_path: Path) -> None:
    """A few digits of its configuration describe a layer of any size, which transformers would make at random."""
    from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

    base = make_base(tmp_path / "base")
    check_loadable(ModelFolder.open(base), AutoModelForCausalLM)
    describe_a_layer_more(base)
    for model_class in (AutoModelForCausalLM, Qwen3MoeForCausalLM):
        with pytest.raises(
            CannotBuildError, match=r"describes a model of \d{9} values, and its files have \d{5,6} at most"
        ):
            check_loadable(ModelFolder.open(base), model_class)
