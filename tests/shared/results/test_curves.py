"""Curves: each value at its place, in one scale; what is missing is a gap."""

from __future__ import annotations

import re

from slipway.results.report.charts import Curve, curve_chart, divergence_by_position, memory_over_time
from slipway.results.result import AttemptResult
from support.commands.report_parts import comparison, not_run, output


def points(chart: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r'<path class="curve \w+" d="M([^"]*)"', chart)
    return [[tuple(map(float, point.split())) for point in line.split(" L")] for line in lines]  # type: ignore[misc]


def test_rows_have_one_scale_or_their_own() -> None:
    curves = [Curve("a", (0.0, 2.0, 4.0), "4"), Curve("b", (1.0,), "1")]
    first = [(0, 100), (50, 50), (100, 0)]
    assert points(str(curve_chart("Two", curves, one_scale=True))) == [first, [(0, 75), (100, 75)]]
    assert points(str(curve_chart("Two", curves))) == [first, [(0, 0), (100, 0)]]


def test_what_is_missing_is_a_gap() -> None:
    chart = str(curve_chart("Gaps", [Curve("a", (None, 1.0, float("nan"), 1.0, 1.0), "1")]))
    assert [len(line) for line in points(chart)] == [1, 2]
    assert "nan" not in chart


def test_nothing_at_all_is_drawn_as_zero() -> None:
    assert points(str(curve_chart("Zero", [Curve("a", (0, 0), "0")]))) == [[(0, 100), (100, 100)]]


def test_texts_are_escaped() -> None:
    chart = str(curve_chart("<b>", [Curve("<i>", (1.0,), "<u>", "<s>")], ends=("<a>", "<p>")))
    assert re.findall(r"<(?:b|i|u|s|a|p)>", chart) == []


def test_outputs_without_positions_have_no_curve() -> None:
    with_positions = comparison(0.1).model_copy(update={"kl_by_position": (0.1, 0.3)})
    found = output("onnx", None)
    curve = found.model_copy(update={"to_reference": with_positions})
    (made,) = divergence_by_position([found, curve, not_run("tensorrt")])
    assert (made.label, made.figure, made.aside) == ("onnx", "0.1 → 0.3", "at most 0.3")


def test_the_memory_of_an_attempt_has_its_peak_and_its_time() -> None:
    attempt = AttemptResult(
        task="merge", stage="merge", number=2, outcome="failed",
        memory_sample_seconds=0.5, memory_samples_bytes=(10_000_000, 30_000_000, 20_000_000),
    )  # fmt: skip
    unknown = AttemptResult(task="onnx", stage="onnx_export", number=1, outcome="succeeded")
    (curve,) = memory_over_time([attempt, unknown])
    assert (curve.label, curve.figure, curve.aside, curve.tone) == ("merge #2", "30.0 MB", "in 1.5 s", "bad")
