"""What is planned, refused and said before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from slipway.configuration import parse
from slipway.model.configuration import ModelConfig
from slipway.planning.plan import plan
from slipway.registry import load_stage
from slipway_coreml.params import CoremlParams
from slipway_coreml.stage import STAGE


def planned(**settings: object) -> dict[str, dict[str, object]]:
    data = {"formats": {"pytorch": {"enabled": False}, "coreml": {"enabled": True, **settings}}}
    tasks = plan(parse(data), ("adapter", "base"))
    for task in tasks:
        task.call.check(load_stage(task.stage))
    return {task.format: dict(task.params) for task in tasks if task.stage == "coreml"}


def test_each_level_is_a_task_of_its_own() -> None:
    tasks = planned(quantization=("int8", "int4"), max_length=64, precision="float32")
    assert list(tasks) == ["coreml", "coreml-int8", "coreml-int4"]
    common = {"precision": "float32", "max_length": 64, "call_length": 128}
    assert tasks["coreml"] == {"level": "none", **common}
    assert tasks["coreml-int8"] == {"level": "int8", **common}
    assert tasks["coreml-int4"] == {"level": "int4", "group_size": 32, **common}
    assert list(planned(quantization=("int8",), unquantized=False)) == ["coreml-int8"]


def test_groups_are_powers_of_two() -> None:
    with pytest.raises(ValidationError, match="group_size 48 is not a power of two"):
        CoremlParams(level="int4", group_size=48)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "marian", "architectures": ["MarianMTModel"], "is_encoder_decoder": True}, "decoders and encoders only"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 16}, "keep a state"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}, "mixture of experts"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, ""),
        ({"model_type": "bert", "vocab_size": 9, "architectures": ["BertForSequenceClassification"]}, ""),
    ],
)  # fmt: skip
def test_models_are_refused_by_name(config: dict[str, object], why: str) -> None:
    said = STAGE.forecast.refuses(STAGE.params(), ModelConfig(config))
    assert why in said
    assert bool(said) is bool(why)
    if why:
        assert config["architectures"][0] in said  # type: ignore[index]
        assert "Core ML" in said


def test_validation_is_told_why_it_cannot_run_a_package(tmp_path: Path) -> None:
    from slipway.proof.runtime import NotRunnable
    from slipway_coreml.runtime import load

    with pytest.raises(NotRunnable, match="coreml-int4 needs Core ML, which only macOS 15"):
        load(tmp_path / "coreml-int4", threads=1)
