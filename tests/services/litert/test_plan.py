"""What is planned and refused before anything runs."""

from __future__ import annotations

import pytest

from slipway.configuration import parse
from slipway.model.configuration import ModelConfig
from slipway.planning.plan import plan
from slipway.registry import load_stage
from slipway_litert.params import text_lengths
from slipway_litert.stage import STAGE

ENCODER = {"model_type": "bert", "vocab_size": 9}


def planned(**settings: object) -> dict[str, dict[str, object]]:
    data = {"formats": {"pytorch": {"enabled": False}, "litert": {"enabled": True, **settings}}}
    tasks = plan(parse(data), ("adapter", "base"))
    for task in tasks:
        task.call.check(load_stage(task.stage))
    return {task.format: dict(task.params) for task in tasks if task.stage == "litert"}


def test_each_level_is_a_task_of_its_own() -> None:
    tasks = planned(quantization=("int8",), max_length=64)
    assert tasks == {
        "litert": {"level": "none", "max_length": 64, "call_length": 128},
        "litert-int8": {"level": "int8", "max_length": 64, "call_length": 128},
    }
    assert list(planned(quantization=("int8",), unquantized=False)) == ["litert-int8"]


@pytest.mark.parametrize(("longest", "lengths"), [(2, (2,)), (32, (32,)), (80, (32, 80)), (512, (32, 128, 512))])
def test_a_short_text_has_a_short_signature(longest: int, lengths: tuple[int, ...]) -> None:
    assert text_lengths(longest) == lengths


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
