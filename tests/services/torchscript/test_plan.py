"""What is planned and refused before anything runs."""

from __future__ import annotations

import pytest

from slipway.configuration import parse
from slipway.errors import ConfigurationError
from slipway.formats.registry import load_format
from slipway.model.configuration import ModelConfig
from slipway.planning.plan import plan
from slipway.proof.comparison import cases, first_unproven_length
from slipway.registry import load_stage
from slipway.sizes import ModelSize
from slipway_torchscript.params import refusal_reason
from support.models.table_models import ROWS

ENCODER = {"model_type": "bert", "vocab_size": 9}


def planned(**formats: object) -> dict[str, dict[str, object]]:
    tasks = plan(parse({"formats": {"pytorch": {"enabled": False}, **formats}}), ("adapter", "base"))
    for task in tasks:
        task.call.check(load_stage(task.stage))
    return {task.format: dict(task.params) for task in tasks if task.stage in ("torchscript", "torch_export")}


def test_each_level_is_a_task_of_its_own() -> None:
    found = planned(
        torchscript={"enabled": True, "quantization": ["bf16"], "optimize": True},
        torch_export={"enabled": True, "aot": True},
    )
    assert found == {
        "torchscript": {"level": "none", "optimize": True},
        "torchscript-bf16": {"level": "bf16", "optimize": True},
        "torch_export": {"level": "none", "aot": True},
    }


def test_what_follows_a_branch_is_a_setting() -> None:
    for flow in ("trace", "script", "prove"):
        found = planned(torchscript={"enabled": True, "control_flow": flow})
        assert found["torchscript"]["control_flow"] == flow
    with pytest.raises(ConfigurationError, match="control_flow"):
        planned(torchscript={"enabled": True, "control_flow": "guess"})


def test_integers_are_refused_with_a_level_that_works() -> None:
    with pytest.raises(
        ConfigurationError, match=r"int4 is not delivered as torchscript: its weights would be integers"
    ):
        planned(torchscript={"enabled": True, "quantization": ["int4"]})


def test_an_estimate_has_the_weights_once_and_once_more_if_they_are_compiled() -> None:
    size = ModelSize(10**9, 2 * 10**9, 10**8, 2 * 10**8, 20_000)
    script, program = (load_format(name) for name in ("torchscript", "torch_export"))
    for each, compiled in ((script, {}), (program, {}), (program, {"aot": True})):
        assert each.output_bytes is not None
        settings = each.settings.model_validate(compiled)
        for level, weight in (("", 4), ("bf16", 2)):
            weights = (size.weights + size.largest) * weight * (2 if compiled else 1)
            assert weights < each.output_bytes(settings, level, size) < 1.01 * weights


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "marian", "architectures": ["MarianMTModel"], "is_encoder_decoder": True}, "decoders and encoders only"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 16}, "keep a state"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}, "mixture of experts"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, ""),
        (ENCODER | {"architectures": ["BertForSequenceClassification"]}, ""),
    ],
)  # fmt: skip
def test_models_are_refused_by_name(config: dict[str, object], why: str) -> None:
    said = refusal_reason(ModelConfig(config))
    assert why in said
    assert bool(said) is bool(why)
    if why:
        assert config["architectures"][0] in said  # type: ignore[index]


REFUSED = {
    "encoder-decoder": ("Marian", "T5", "Whisper"),
    "mixture of experts": ("Mixtral", "Qwen3-MoE", "Qwen2-MoE", "OLMoE", "DeepSeek-V3"),
}
"""Rows of the table of families, by what is said of them."""


@pytest.mark.parametrize("why", REFUSED)
def test_pairs_and_mixtures_are_refused_whatever_their_configuration_calls_it(why: str) -> None:
    import transformers

    for row in (each for each in ROWS if each.name in REFUSED[why]):
        settings = getattr(transformers, row.model).config_class(**row.settings).to_dict()
        assert why in refusal_reason(ModelConfig({**settings, "architectures": [row.model]})), row.name


def test_calls_go_beyond_every_length_at_which_a_model_computes_otherwise() -> None:
    found = list(cases(cached=True, one_row=False, positions=64, thresholds=(8, 500), longest=512))
    totals = [case.past + case.sequence for case in found]
    assert max(totals) == 13  # beyond 8; 500 is more than the model takes
    assert min(totals) == 1
    assert {case.past for case in found} >= {0, 4, 6, 12}
    assert all(case.batch == 1 for case in cases(cached=False, one_row=True, positions=64, thresholds=(), longest=512))
    assert first_unproven_length(positions=64, thresholds=(8, 500), longest=512) == 0
    assert first_unproven_length(positions=8192, thresholds=(4096,), longest=512) == 4096
