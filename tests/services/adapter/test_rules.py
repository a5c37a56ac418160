"""Each documented rule of the servers refuses, or cautions about, an adapter that it is about; a plain one passes them all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch

from slipway.configuration import parse
from slipway.errors import AdapterExportError, ConfigurationError, ModelExportError
from slipway.model.adapters.saved import read_saved
from slipway.planning.plan import plan
from slipway.planning.preflight import Verdict, preflight
from slipway_adapter.params import Target
from slipway_adapter.rules import RULES, VLLM_RANKS, Rule, check_rules, flag_for
from support.models.saved_adapters import edit, write

MODULE = "model.layers.0.self_attn.q_proj"


def pair(module: str = MODULE, rank: int = 4) -> dict[str, torch.Tensor]:
    return {f"{module}.lora_A.weight": torch.ones(rank, 6), f"{module}.lora_B.weight": torch.ones(8, rank)}


class Planted(NamedTuple):
    """An adapter that a rule is about."""

    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]
    said: str


EMBEDDING = {
    "model.embed_tokens.lora_embedding_A": torch.ones(4, 9),
    "model.embed_tokens.lora_embedding_B": torch.ones(6, 4),
}
PLANTED = {
    "form": Planted(pair(), {"peft_type": "LOHA"}, "LOHA"),
    "dora": Planted(pair() | {f"{MODULE}.lora_magnitude_vector": torch.ones(8)}, {"use_dora": True}, "use_dora"),
    "modules_to_save": Planted(
        pair() | {"lm_head.weight": torch.ones(9, 6)}, {"modules_to_save": ["lm_head"]}, "lm_head"
    ),
    "bias": Planted(
        pair() | {"model.layers.0.self_attn.q_proj.bias": torch.ones(8)}, {"bias": "lora_only"}, "lora_only"
    ),
    "tokens": Planted(
        pair() | {"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 6)},
        {"trainable_token_indices": [3]},
        "trainable_token_indices",
    ),
    "experts": Planted(pair("model.layers.0.mlp.experts.0.up_proj"), {}, "mlp.experts.0.up_proj"),
    "replication": Planted(pair(), {"layer_replication": [[0, 2]]}, "layer_replication"),
    "convolution": Planted(
        {"conv.lora_A.weight": torch.ones(4, 3, 3, 3), "conv.lora_B.weight": torch.ones(8, 4, 1, 1)}, {}, "'conv'"
    ),
    "variant": Planted(pair(), {"init_lora_weights": "pissa"}, "pissa"),
    "strangers": Planted(pair() | {f"{MODULE}.lora_ga_gate": torch.ones(1)}, {}, "lora_ga_gate"),
    "nothing": Planted({"lm_head.weight": torch.ones(9, 6)}, {}, "no pair"),
    "rank": Planted(pair(rank=513), {"r": 513}, "513"),
    "max_lora_rank": Planted(pair(rank=17), {"r": 17}, "--max-lora-rank 32"),
    "embedding": Planted(EMBEDDING, {}, "embed_tokens"),
    "lookup": Planted(EMBEDDING, {}, "embed_tokens"),
}


def test_every_rule_is_planted_and_says_where_it_is_documented() -> None:
    assert {rule.name for rule in RULES} == PLANTED.keys()
    assert len({(rule.name, target) for rule in RULES for target in rule.targets}) == sum(
        len(rule.targets) for rule in RULES
    )
    assert all(rule.source for rule in RULES)


@pytest.mark.parametrize(
    ("rule", "target"),
    [pytest.param(rule, target, id=f"{rule.name}-{target}") for rule in RULES for target in rule.targets],
)
def test_a_rule_finds_what_it_is_about(tmp_path: Path, rule: Rule, target: Target) -> None:
    planted = PLANTED[rule.name]
    saved = read_saved(write(tmp_path / "adapter", dict(planted.tensors), **planted.settings))
    if not rule.refuses:
        (caution,) = check_rules(saved, target)
        assert planted.said in caution
        return
    with pytest.raises(AdapterExportError) as caught:
        check_rules(saved, target)
    error = caught.value
    assert (error.reason, error.about["rule"]) == ("ADAPTER_NOT_SERVABLE", rule.name)
    assert planted.said in error.message
    assert rule.source in error.message
    assert "merged model" in error.remedy


def test_a_plain_adapter_passes(tmp_path: Path) -> None:
    saved = read_saved(write(tmp_path / "adapter", pair(), bias="none", modules_to_save=None, use_dora=False))
    assert [check_rules(saved, target) for target in get_args(Target)] == [()] * 3


def test_ranks_are_those_that_the_flag_takes() -> None:
    assert [flag_for(rank) for rank in (1, 2, 16, 17, 257, 512)] == [1, 8, 16, 32, 320, 512]
    assert sorted(VLLM_RANKS) == list(VLLM_RANKS)


def refusal(deliver: Any, base: Path, adapter: Path) -> ModelExportError:
    with pytest.raises(ModelExportError) as caught:
        deliver(base, adapter)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "options", "rule"),
    [
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}, "conv1d"),
        ("qwen3-tied", {"target_modules": ["q_proj", "lm_head"]}, "tied"),
        ("qwen3-tied", {"target_modules": ["q_proj", "embed_tokens"]}, "tied"),
    ],
    ids=["conv1d", "head", "embedding"],
)
def test_layers_that_servers_do_not_wrap_are_refused(tune, deliver, bases, kind, options, rule) -> None:
    error = refusal(deliver, bases(kind), tune(kind, **options))
    assert (error.reason, error.about["rule"]) == ("ADAPTER_NOT_SERVABLE", rule)


def test_a_saved_embedding_is_left_out_if_it_is_the_bases_own(tune, deliver, bases) -> None:
    adapter = tune(target_modules=["q_proj", "embed_tokens"])
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    from safetensors.torch import load_file

    own = load_file(bases("qwen3") / "model.safetensors")["model.embed_tokens.weight"]
    edit(adapter, tensors=lambda tensors: {**tensors, name: own})
    folder, ctx = deliver(bases("qwen3"), adapter)
    assert not [key for key in load_file(folder / "adapter_model.safetensors") if "base_layer" in key]
    assert any("embed_tokens" in warning for warning in ctx.facts["warnings"])
    edit(adapter, tensors=lambda tensors: {**tensors, name: torch.cat([own, own[:2]])})
    with pytest.raises(AdapterExportError, match="brings another") as caught:
        deliver(bases("qwen3"), adapter, name="again")
    assert caught.value.about["rule"] == "vocabulary"


ONLY = {
    "pytorch": {"enabled": False},
    "onnx": {"enabled": False},
    "adapter": {"enabled": True, "targets": ["peft", "onnx"]},
}


def test_an_adapter_that_is_refused_stops_the_export_before_it_starts(tune, bases, tmp_path) -> None:
    adapter = tune(use_dora=True)
    tasks = plan(parse({"formats": ONLY, "checkpoint": {"path": "x"}}), ["base", "adapter"])
    places = {"base": bases("qwen3"), "home": tmp_path, "output": tmp_path}
    found = preflight(tasks, adapter=adapter, **places)
    error = found.error()
    assert error is not None
    assert error.reason == "ADAPTER_NOT_SERVABLE"
    assert preflight(tasks, adapter=tune(name="plain"), **places).error() is None
    cautioned = preflight(tasks, adapter=tune(name="wide", r=20), **places)
    said = [finding.message for finding in cautioned.findings if finding.verdict is Verdict.WARNING]
    assert [message for message in said if "--max-lora-rank 32" in message]


def test_the_plan_takes_the_base_and_the_adapter_that_others_take() -> None:
    tasks = {task.id: task for task in plan(parse({"formats": ONLY, "checkpoint": {"path": "x"}}), ["base", "adapter"])}
    assert tasks["adapter"].inputs == {"base": "source:base", "adapter": "source:adapter"}
    assert tasks["adapter-onnx"].format == "adapter-onnx"
    assert tasks["onnx_export-adapter"].inputs == {"pytorch": "source:base"}
    judged = tasks["validate"].inputs
    assert judged["adapter"] == "source:adapter"
    assert judged["output.adapter"] == "task:adapter/adapter"
    assert judged["adapter-onnx"] == "task:adapter-onnx/adapter"
    combined = {"formats": ONLY, "checkpoint": {"path": "x"}, "combination": {"adapters": ["y"]}}
    tasks = {task.id: task for task in plan(parse(combined), ["base", "adapter", "adapter-02"])}
    assert tasks["adapter"].inputs["adapter"] == "task:combine/adapter"


def test_a_plain_model_has_none() -> None:
    with pytest.raises(ConfigurationError, match="the format adapter delivers an adapter") as caught:
        plan(parse({"formats": ONLY}), ["base"])
    assert "checkpoint.path" in caught.value.remedy
