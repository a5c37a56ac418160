"""A recovery profile shapes the first attempt where the settings leave it open."""

from __future__ import annotations

from typing import Any

import pytest

from slipway.configuration import ExportConfiguration
from slipway.planning.plan import plan
from slipway_onnx_export.params import OnnxExportParams


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
