"""What is planned and refused before anything runs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from slipway.configuration import parse
from slipway.configuration.export import cautions
from slipway.model.configuration import ModelConfig
from slipway.planning.plan import plan
from slipway.registry import load_stage
from slipway_executorch.params import ExecutorchParams
from slipway_executorch.stage import STAGE

ENCODER = {"model_type": "bert", "vocab_size": 9}


def planned(**settings: object) -> dict[str, dict[str, object]]:
    data = {"formats": {"pytorch": {"enabled": False}, "executorch": {"enabled": True, **settings}}}
    tasks = plan(parse(data), ("adapter", "base"))
    for task in tasks:
        task.call.check(load_stage(task.stage))
    return {task.format: dict(task.params) for task in tasks if task.stage == "executorch"}


def test_each_level_is_a_task_of_its_own() -> None:
    tasks = planned(quantization=("8da4w",), max_length=64)
    assert list(tasks) == ["executorch", "executorch-8da4w"]
    assert tasks["executorch"] == {"level": "none", "max_length": 64, "call_length": 128}
    assert tasks["executorch-8da4w"]["group_size"] == 32
    assert list(planned(quantization=("8da4w",), unquantized=False)) == ["executorch-8da4w"]


@pytest.mark.parametrize(
    ("size", "quantization", "warned"), [(16, ["8da4w"], True), (64, ["8da4w"], False), (16, [], False)]
)
def test_groups_that_have_no_kernel_become_others_with_a_warning(
    size: int, quantization: list[str], warned: bool
) -> None:
    section = {"enabled": True, "quantization": quantization}
    data = {"optimization": {"group_size": size}, "formats": {"pytorch": {"enabled": False}, "executorch": section}}
    found = [
        task.params["group_size"] for task in plan(parse(data), ("adapter", "base")) if "group_size" in task.params
    ]
    assert found == [max(size, 32)] * len(quantization)
    said = "optimization.group_size: executorch has no groups of 16 weights, and gets groups of 32"
    assert (said in cautions(parse(data))) is warned


def test_groups_that_have_no_kernel_are_refused() -> None:
    with pytest.raises(ValidationError, match="group_size 16 is not one of 32"):
        ExecutorchParams(level="8da4w", group_size=16)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "marian", "architectures": ["MarianMTModel"], "is_encoder_decoder": True}, "decoders and encoders only"),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}, "decoders and"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 16}, "keep a state"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}, "mixture of experts"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, ""),
        (ENCODER | {"architectures": ["BertForSequenceClassification"]}, ""),
    ],
)  # fmt: skip
def test_models_are_refused_by_name(config: dict[str, object], why: str) -> None:
    said = STAGE.forecast.refuses(STAGE.params(), ModelConfig(config))
    assert why in said
    assert bool(said) is bool(why)
    if why:
        assert config["architectures"][0] in said  # type: ignore[index]
