"""Text for levels that cannot be made without it, and for those that are better with it."""

from __future__ import annotations

from typing import Any

import pytest

from slipway.configuration import parse
from slipway.formats.tasks import PlannedTask
from slipway.planning.plan import plan
from slipway.registry import load_stage

TEXT = "task:calibration_data/data"


def planned(data: dict[str, Any], *more: str) -> dict[str, PlannedTask]:
    tasks = plan(parse(data), ("adapter", "base", *more))
    for task in tasks:
        task.call.check(load_stage(task.stage))
    return {task.id: task for task in tasks}


def levels(*names: str, **optimization: Any) -> dict[str, Any]:
    return {"optimization": optimization, "formats": {"onnx": {"quantization": list(names)}}}


@pytest.mark.parametrize("method", ["rtn", "auto", "gptq"])
def test_static_ranges_have_text_whatever_the_method(method: str) -> None:
    tasks = planned(levels("int8_static", "int8_dynamic", method=method))
    assert tasks["quantize-onnx-int8_static"].inputs["data"] == TEXT
    assert "data" not in tasks["quantize-onnx-int8_dynamic"].inputs
    assert "calibrate-int8" not in tasks


def test_the_settings_of_ranges_reach_their_level_alone() -> None:
    settings = {"quantization": ["int8_static", "int8"], "int8_ranges": "entropy", "int8_smoothing": 0.25}
    tasks = planned({"formats": {"onnx": settings}})
    assert {"activation_ranges": "entropy", "smoothing": 0.25}.items() <= tasks[
        "quantize-onnx-int8_static"
    ].params.items()
    assert "smoothing" not in tasks["quantize-onnx-int8"].params


def test_fp16_takes_text_only_if_there_is_some() -> None:
    assert "calibration_data" not in planned(levels("fp16", method="auto"))
    with_others = planned(levels("fp16", "int8_static"))
    assert with_others["quantize-onnx-fp16"].inputs["data"] == TEXT
    named = planned(levels("fp16", calibration="texts"), "calibration")
    assert named["quantize-onnx-fp16"].inputs["data"] == TEXT
    assert named["calibration_data"].inputs["calibration"] == "source:calibration"


def test_bf16_and_integers_alone_take_none() -> None:
    assert "calibration_data" not in planned(levels("int8", "int8_dynamic"))
    assert "calibration_data" not in planned({"formats": {"pytorch": {"quantization": ["bf16"]}}})
