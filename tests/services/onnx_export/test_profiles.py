"""A recovery profile shapes the first attempt where the settings leave it open."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from slipway.configuration import ExportConfiguration
from slipway.configuration.schema import parse_text
from slipway.planning.plan import plan
from slipway_onnx_export.params import OnnxExportParams

KEY = "formats.onnx.static_shape"


def first(profile: str | None, **settings: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "checkpoint": {"path": "run"},
        "base_model": {"name": "base"},
        "formats": {"onnx": {"enabled": True, **settings}},
    }
    if profile:
        document["recovery"] = {"profile": profile}
    configuration = ExportConfiguration.model_validate(document)
    again = ExportConfiguration.model_validate(configuration.model_dump(mode="json"))  # as a coordinator stores it
    (task,) = [task for task in plan(again, {"base", "adapter"}) if task.id == "onnx_export"]
    params = OnnxExportParams(**task.params)
    return {name: getattr(params, name) for name in ("engine", "opset", "shapes", "optimization")}


@pytest.mark.parametrize(
    ("profile", "opset", "shapes", "optimization"),
    [
        (None, None, "dynamic", "all"),
        ("auto", None, "dynamic", "all"),
        ("aggressive", None, "dynamic", "all"),
        ("balanced", 17, "dynamic", "basic"),
        ("conservative", 14, "batch", "none"),
    ],
)
def test_the_first_attempt(profile: str | None, opset: int | None, shapes: str, optimization: str) -> None:
    found = first(profile)
    assert found == {"engine": "auto", "opset": opset, "shapes": shapes, "optimization": optimization}


def test_what_is_set_wins_over_the_profile() -> None:
    settings = {"opset_version": 20, "dynamic_axes": True, "optimize_graph": True, "engine": "dynamo"}
    found = first("conservative", **settings)
    assert found == {"engine": "dynamo", "opset": 20, "shapes": "dynamic", "optimization": "all"}
    assert first("aggressive", dynamic_axes=False, optimize_graph=False)["shapes"] == "batch"
    assert first("aggressive", dynamic_axes=False, optimize_graph=False)["optimization"] == "basic"


@pytest.mark.parametrize(
    ("settings", "shapes", "sizes"),
    [
        ({"shapes": "static"}, "static", (1, None, None)),
        ({"shapes": "batch", "static_shape": {"batch": 4}}, "batch", (4, None, None)),
        ({"dynamic_axes": False}, "batch", (1, None, None)),
        ({"shapes": "static", "static_shape": [1, 16, 240]}, "static", (1, 16, 240)),
        ({"shapes": "static", "static_shape": {"sequence": 16, "total_sequence": 256}}, "static", (1, 16, 240)),
        (
            {"shapes": "static", "static_shape": {"input_ids": {"batch": 2, "sequence": 16}, "past_key_values": {"past_sequence": 48}}},
            "static", (2, 16, 48),
        ),
        ({"shapes": "static", "static_shape": parse_text(KEY, "input_ids.sequence=16, past_sequence=48")}, "static", (1, 16, 48)),
        ({"shapes": "static", "layered": True, "static_shape": [1, 4, 60]}, "static", (1, 4, 60)),
        ({"layered": True}, "dynamic", (1, None, None)),
    ],
    ids=str,
)  # fmt: skip
def test_shapes_are_ordered_with_their_sizes(
    settings: Any, shapes: str, sizes: tuple[int, int | None, int | None]
) -> None:
    document = {"checkpoint": {"path": "run"}, "base_model": {"name": "base"}, "formats": {"onnx": settings}}
    configuration = ExportConfiguration.model_validate(document)
    (task,) = [task for task in plan(configuration, {"base", "adapter"}) if task.id == "onnx_export"]
    params = OnnxExportParams(**task.params)
    assert (params.shapes, (params.batch, params.sequence, params.past)) == (shapes, sizes)
    assert "shapes" not in task.open or not {"shapes", "dynamic_axes"} & settings.keys()


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({"shapes": "static", "static_shape": {"sequence": 64}}, 64),
        ({"shapes": "static", "static_shape": [1, 16, 48]}, 49),
        ({"shapes": "static"}, None),
        ({"static_shape": [1, 16, 48]}, None),
    ],
    ids=str,
)
def test_all_outputs_are_judged_on_texts_that_a_fixed_graph_takes(settings: Any, longest: int | None) -> None:
    document = {"checkpoint": {"path": "run"}, "base_model": {"name": "base"}, "formats": {"onnx": settings}}
    tasks = plan(ExportConfiguration.model_validate(document), {"base", "adapter"})
    samples = [task.params.get("longest_text") for task in tasks if task.id in ("reference", "validate")]
    assert samples == [longest, longest]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shapes": "static", "dynamic_axes": True}, "an earlier spelling, and contradicts shapes static"),
        ({"shapes": "static", "logits_to_keep": 1}, "returns logits of all tokens"),
        ({"shapes": "static", "past_present_share_buffer": True}, "its length would be fixed"),
        ({"shapes": "fixed"}, "dynamic"),
        ({"static_shape": {"rows": 2}}, "is no axis of a graph"),
        ({"static_shape": {"input_tokens": {"batch": 2}}}, "is no input of a graph"),
        ({"static_shape": {"input_ids": {"batch": 2}, "attention_mask": {"batch": 3}}}, "contradicts"),
        ({"static_shape": {"sequence": 16, "past": 16, "total_sequence": 256}}, "together"),
    ],
    ids=str,
)
def test_shapes_that_contradict_each_other_are_refused(settings: Any, words: str) -> None:
    document = {"checkpoint": {"path": "run"}, "base_model": {"name": "base"}, "formats": {"onnx": settings}}
    with pytest.raises(ValidationError, match=words):
        ExportConfiguration.model_validate(document)


def test_times_of_the_optimization_are_measured_on_request() -> None:
    for asked in (False, True):
        document = {
            "checkpoint": {"path": "run"},
            "base_model": {"name": "base"},
            "formats": {"onnx": {"optimization_times": asked}},
        }
        tasks = plan(ExportConfiguration.model_validate(document), {"base", "adapter"})
        (task,) = [task for task in tasks if task.id == "onnx_export"]
        assert OnnxExportParams(**task.params).optimization_times is asked


def test_sizes_of_static_shapes_wait_for_the_attempt_that_needs_them() -> None:
    document = {
        "checkpoint": {"path": "run"},
        "base_model": {"name": "base"},
        "formats": {"onnx": {"static_shape": [2, 4, 60]}},
    }
    configuration = ExportConfiguration.model_validate(document)
    (task,) = [task for task in plan(configuration, {"base", "adapter"}) if task.id == "onnx_export"]
    assert OnnxExportParams(**task.params).shapes == "dynamic"
    static = OnnxExportParams(**{**task.params, "shapes": "static"})
    assert (static.batch, static.sequence, static.past) == (2, 4, 60)


@pytest.mark.parametrize("provider", ["auto", "cpu", "cuda"])
def test_the_provider_is_asked_for_as_it_is_set(provider: str) -> None:
    document = {
        "checkpoint": {"path": "run"},
        "base_model": {"name": "base"},
        "formats": {"onnx": {"provider": provider}},
    }
    configuration = ExportConfiguration.model_validate(document)
    (task,) = [task for task in plan(configuration, {"base", "adapter"}) if task.id == "onnx_export"]
    assert OnnxExportParams(**task.params).provider == provider
