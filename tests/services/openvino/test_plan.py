"""What the format plans: one graph, the integer levels of it, and an IR of each."""

from __future__ import annotations

import pytest

from slipway.formats import FormatRequest
from slipway.model.configuration import ModelConfig
from slipway_openvino.format import FORMAT, OpenVinoConfiguration, plan
from slipway_openvino.params import refusal_reason

LEVELS = ("fp16", "int8", "int4")


def request(**more: object) -> FormatRequest[OpenVinoConfiguration]:
    settings = OpenVinoConfiguration(enabled=True)
    return FormatRequest(name="openvino", settings=settings, levels=LEVELS, model="task:merge/pytorch", **more)


def test_all_levels_are_made_of_one_graph() -> None:
    tasks = {task.id: task for task in plan(request())}
    assert {id_: (dict(task.inputs), task.format) for id_, task in tasks.items()} == {
        "onnx_export-openvino": ({"pytorch": "task:merge/pytorch"}, ""),
        "quantize-openvino-int8": ({"model": "task:onnx_export-openvino/onnx"}, ""),
        "quantize-openvino-int4": ({"model": "task:onnx_export-openvino/onnx"}, ""),
        "openvino": ({"onnx": "task:onnx_export-openvino/onnx"}, "openvino"),
        "openvino-fp16": ({"onnx": "task:onnx_export-openvino/onnx"}, "openvino-fp16"),
        "openvino-int8": ({"onnx": "task:quantize-openvino-int8/model"}, "openvino-int8"),
        "openvino-int4": ({"onnx": "task:quantize-openvino-int4/model"}, "openvino-int4"),
    }
    assert tasks["onnx_export-openvino"].params["optimization"] == "basic"  # without ONNX Runtime's own operators
    assert tasks["quantize-openvino-int4"].params["format"] == "onnx"


def test_a_calibration_and_a_size_budget_reach_the_integers() -> None:
    tasks = {
        task.id: task
        for task in plan(
            request(group_size=64, widths={"size_budget_share": 0.3}, calibrations={"int4": "task:calibrate-int4/c"})
        )
    }
    made = tasks["quantize-openvino-int4"]
    assert made.inputs["calibration"] == "task:calibrate-int4/c"
    assert (made.params["group_size"], made.params["size_budget_share"]) == (64, 0.3)
    assert "calibration" not in tasks["quantize-openvino-int8"].inputs


def test_every_level_has_a_task_that_delivers_it() -> None:
    delivered = {task.format for task in plan(request()) if task.format}
    assert delivered == {FORMAT.output_name(level) for level in ("", *FORMAT.levels)}


@pytest.mark.parametrize(
    ("architecture", "model_type", "refused"),
    [
        ("Qwen3ForCausalLM", "qwen3", False),
        ("BertForSequenceClassification", "bert", False),
        ("MarianMTModel", "marian", False),
        ("WhisperForConditionalGeneration", "whisper", False),
        ("ViTForImageClassification", "vit", True),
    ],
)
def test_families_are_refused_before_anything_runs(architecture: str, model_type: str, refused: bool) -> None:
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "is_encoder_decoder": model_type in ("marian", "whisper"),
        "vocab_size": 9,
    }
    reason = refusal_reason(ModelConfig(config))
    assert bool(reason) is refused
    assert not refused or architecture in reason


@pytest.mark.parametrize(
    ("model_type", "refused"),
    [("qwen3_moe", False), ("glm4_moe", False), ("gpt_oss", False), ("llama4_text", False), ("phimoe", True)],
)
def test_mixtures_that_were_not_compared_are_refused(model_type: str, refused: bool) -> None:
    config = {"architectures": ["AForCausalLM"], "model_type": model_type, "num_experts": 8, "vocab_size": 9}
    assert ("mixture of experts" in refusal_reason(ModelConfig(config))) is refused
