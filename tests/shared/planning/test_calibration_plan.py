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
        "head": False,
        "wide_share": 0.22,
    }
    for name in ("quantize-pytorch-int4", "quantize-onnx-int4"):
        assert tasks[name].inputs["calibration"] == "task:calibrate-int4/calibration"
        assert (tasks[name].params["wide_share"], tasks[name].params["head_bits"]) == (0.22, 8)
    assert "calibration" not in tasks["quantize-onnx-int8"].inputs


def test_a_method_that_is_named_calibrates_every_integer_level() -> None:
    tasks = planned({"optimization": {"quantization": ["int8", "int4", "fp16"], "method": "gptq"}})
    assert {name: tasks[name].params["bits"] for name in tasks if name.startswith("calibrate")} == {
        "calibrate-int4": 4,
        "calibrate-int8": 8,
    }
    assert tasks["calibrate-int8"].params["symmetric"] is True
    assert "calibration" not in tasks["quantize-onnx-fp16"].inputs


@pytest.mark.parametrize(
    "data",
    [
        {"optimization": {"quantization": "int4", "method": "rtn"}},
        {"optimization": {"quantization": "int8"}},
        {"optimization": {"quantization": "int8", "method": "auto"}},
        {"optimization": {"quantization": "fp16", "method": "autoround"}},
    ],
)
def test_nothing_is_calibrated_that_nobody_needs(data: dict[str, Any]) -> None:
    tasks = planned({**data, "validation": {"on_failure": "fail"}}, "calibration")
    assert not [name for name in tasks if name.startswith("calibra")]
    assert not [task for task in tasks.values() if "calibration" in task.inputs]


def test_integers_are_chosen_by_text_where_there_is_some() -> None:
    settings = {"optimization": {"quantization": "int4"}, "validation": {"on_failure": "fail"}}
    assert "calibration" in planned(settings, "calibration")["quantize-onnx-int4"].inputs
    assert "calibration" not in planned(settings)["quantize-onnx-int4"].inputs


def test_a_format_whose_runtimes_take_no_zero_points_beside_wide_weights_has_a_calibration_of_its_own() -> None:
    tasks = planned({"optimization": {**INT4, "symmetric": False}})
    own, usual = tasks["calibrate-int4-symmetric"], tasks["calibrate-int4"]
    assert (own.params["symmetric"], usual.params["symmetric"]) == (True, False)
    assert tasks["quantize-pytorch-int4"].inputs["calibration"] == own.reference
    assert tasks["quantize-onnx-int4"].inputs["calibration"] == usual.reference
    one = planned({"optimization": {**INT4, "symmetric": False, "wide_share": 0}})
    assert [name for name in one if name.startswith("calibra")] == ["calibration_data", "calibrate-int4"]


@pytest.mark.parametrize(
    ("settings", "overlap"),
    [
        ({"optimization": {**INT4, "calibration": "/data"}}, "leave_out"),
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
        ({"wide_share": 1.5}, "optimization.wide_share"),
        ({"head_bits": 5}, "optimization.head_bits"),
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
    rounded = {"optimization": {"quantization": "int4", "calibration": "/data"}, "validation": {"on_failure": "fail"}}
    rounded["optimization"]["method"] = "rtn"
    assert planned(rounded)  # rtn takes none, and nothing is in reserve


RESERVE = {"optimization": {"quantization": ["int4", "int8"]}}
"""An output that fails is made again without being asked to."""


def test_a_fallback_keeps_a_calibration_in_reserve() -> None:
    tasks = planned(RESERVE)
    calibrate, data = tasks["calibrate-int4"], tasks["calibration_data"]
    assert (calibrate.params["method"], calibrate.params["bits"]) == ("auto", 4)
    assert calibrate.fallback
    assert data.fallback
    for name in ("quantize-pytorch-int4", "quantize-onnx-int4"):
        assert tasks[name].reserve == {"calibration": "task:calibrate-int4/calibration"}
        assert "calibration" not in tasks[name].inputs
    assert not tasks["quantize-onnx-int8"].reserve
    assert tasks["merge"].params["save_tokenizer"] is True
    optimization = {**RESERVE["optimization"], "calibration": "text", "method": "rtn"}
    assert planned({**RESERVE, "optimization": optimization}, "calibration")["calibration_data"].fallback


@pytest.mark.parametrize(
    "changed",
    [
        {"validation": {"on_failure": "keep"}},
        {"validation": {"on_failure": "fallback", "compare_outputs": False}},
        {"optimization": {"quantization": "int8"}},
    ],
)
def test_otherwise_nothing_is_in_reserve(changed: dict[str, Any]) -> None:
    tasks = planned({**RESERVE, **changed})
    assert not any(name.startswith("calibra") for name in tasks)
    assert not any(task.reserve for task in tasks.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400MiB", {"size_budget_bytes": 400 << 20}),
        (419430400, {"size_budget_bytes": 400 << 20}),
        (0.3, {"size_budget_share": 0.3}),
        ("30 %", {"size_budget_share": 0.3}),
    ],
)
def test_a_size_budget_is_a_size_or_a_share(text: Any, expected: dict[str, float]) -> None:
    tasks = planned({"optimization": {**INT4, "method": "auto", "size_budget": text}})
    for name in ("quantize-pytorch-int4", "quantize-onnx-int4"):
        assert expected.items() <= tasks[name].params.items()
    assert not any(key.startswith("size_budget") for key in tasks["quantize-onnx-int8"].params)
    assert tasks["calibrate-int4"].params["sensitivity"] is True


@pytest.mark.parametrize("text", ["much", "0", "-1", "1.5", "0%", "101%", True, "1e9", "9" * 30])
def test_any_other_size_budget_is_refused(text: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"optimization\.size_budget"):
        parse({"optimization": {**INT4, "size_budget": text}})


def test_a_size_budget_of_dense_weights_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"compress_weights"):
        parse({"optimization": {**INT4, "size_budget": "1GiB", "compress_weights": False}})


@pytest.mark.parametrize(
    ("effort", "tokens", "planned_tokens"),
    [("thorough", None, 256), ("thorough", 0, None), ("thorough", 8, 8), ("standard", None, None)],
)
def test_a_thorough_validation_continues_texts(effort: str, tokens: int | None, planned_tokens: int | None) -> None:
    validation = {"effort": effort} | ({} if tokens is None else {"continuation_tokens": tokens})
    tasks = planned({"validation": validation})
    assert tasks["validate"].params.get("continuation_tokens") == planned_tokens
    assert tasks["reference"].params.get("continuation_tokens") == planned_tokens
