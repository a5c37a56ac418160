"""One calibration per level, shared by all formats that deliver it, and its text; none where nothing needs it."""

from __future__ import annotations

from typing import Any

import pytest

from slipway.configuration import parse
from slipway.errors import ConfigurationError, ServiceError
from slipway.formats.tasks import PlannedTask
from slipway.planning.plan import plan
from slipway.registry import load_stage

SOURCES = ("adapter", "base")
INT4 = {"quantization": ["int8", "int4"], "method": "auto"}


def planned(data: dict[str, Any], *more: str) -> dict[str, PlannedTask]:
    tasks = plan(parse(data), (*SOURCES, *more))
    for task in tasks:
        task.call.check(load_stage(task.stage))
    return {task.id: task for task in tasks}


def test_all_formats_of_a_level_share_one_calibration() -> None:
    tasks = planned({"optimization": {**INT4, "group_size": 64, "time_budget": 90}})
    assert [name for name in tasks if name.startswith("calibra")] == ["calibration_data", "calibrate-int4"]
    calibrate = tasks["calibrate-int4"]
    assert calibrate.inputs == {"model": "task:merge/pytorch", "data": "task:calibration_data/data"}
    assert calibrate.params == {
        "bits": 4,
        "group_size": 64,
        "method": "auto",
        "symmetric": True,
        "time_budget_seconds": 90,
    }
    for name in ("quantize-pytorch-int4", "quantize-onnx-int4"):
        assert tasks[name].inputs["calibration"] == "task:calibrate-int4/calibration"
    assert "calibration" not in tasks["quantize-onnx-int8"].inputs


def test_a_method_that_is_named_calibrates_every_integer_level() -> None:
    tasks = planned({"optimization": {"quantization": ["int8", "int4", "fp16"], "method": "gptq"}})
    assert {name: tasks[name].params["bits"] for name in tasks if name.startswith("calibrate")} == {
        "calibrate-int4": 4,
        "calibrate-int8": 8,
    }
    assert "calibration" not in tasks["quantize-onnx-fp16"].inputs


@pytest.mark.parametrize(
    "data",
    [
        {"optimization": {"quantization": "int4"}},
        {"optimization": {"quantization": "int4", "method": "rtn"}},
        {"optimization": {"quantization": "int8", "method": "auto"}},
        {"optimization": {"quantization": "fp16", "method": "autoround"}},
        {"optimization": {"method": "auto"}, "formats": {"onnx": {"enabled": False, "quantization": "int4"}}},
    ],
)
def test_nothing_is_calibrated_that_nobody_needs(data: dict[str, Any]) -> None:
    tasks = planned(data, "calibration")
    assert not [name for name in tasks if name.startswith("calibra")]
    assert not [task for task in tasks.values() if "calibration" in task.inputs]


@pytest.mark.parametrize(
    ("settings", "overlap"),
    [
        ({"optimization": {**INT4, "calibration": "/data"}}, "refuse"),
        ({"optimization": INT4}, "leave_out"),
        ({"optimization": {**INT4, "calibration": "/data"}, "validation": {"enabled": False}}, "ignore"),
    ],
)
def test_text_is_compared_with_the_held_out_text(settings: dict[str, Any], overlap: str) -> None:
    task = planned(settings, "calibration", "heldout")["calibration_data"]
    named = bool(settings["optimization"].get("calibration"))
    assert task.params == {"source": "given" if named else "run", "overlap": overlap}
    inputs = {"model": "task:merge/pytorch", "calibration": "source:calibration", "heldout": "source:heldout"}
    assert task.inputs == (inputs if overlap != "ignore" else {name: inputs[name] for name in ("model", "calibration")})


def test_an_export_can_do_without_a_calibration_but_not_without_the_text_that_the_user_named() -> None:
    tasks = planned({"optimization": {**INT4, "calibration": "/data"}}, "calibration")
    assert [bool(tasks[name].fallback) for name in ("calibration_data", "calibrate-int4", "merge")] == [
        False,
        True,
        False,
    ]
    assert planned({"optimization": INT4})["calibration_data"].fallback


def test_the_merged_model_keeps_the_tokenizer_that_reads_the_text() -> None:
    data = {"formats": {"pytorch": {"save_tokenizer": False}, "onnx": {"enabled": False}}}
    assert not planned(data)["merge"].params["save_tokenizer"]
    assert planned({**data, "optimization": INT4})["merge"].params["save_tokenizer"]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"method": "hqq"}, "optimization.method"),
        ({"method": True}, "optimization.method"),
        ({"symmetric": "no"}, "optimization.symmetric"),
        ({"symmetric": False}, "set optimization.method to auto"),
        ({"time_budget": 0}, "optimization.time_budget"),
        ({"time_budget": 1.5}, "optimization.time_budget"),
        ({"calibration": ["a"]}, "optimization.calibration"),
        ({"calibration": "a\u202eb"}, "invisible character"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        parse({"optimization": settings})


def test_text_that_the_settings_name_has_to_be_brought() -> None:
    with pytest.raises(ServiceError, match="sources lacks calibration"):
        planned({"optimization": {**INT4, "calibration": "/data"}})
    assert planned({"optimization": {"quantization": "int4", "calibration": "/data"}})  # rtn takes none
