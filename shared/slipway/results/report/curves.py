"""Draw curves, one per row, as HTML lists with inline SVG, beside the bars of :mod:`slipway.results.report.plots`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from slipway.results.report import figures
from slipway.results.result import AttemptResult
from slipway.validation.findings import OutputStatus, OutputValidation

_TONE = {OutputStatus.PASSED: "plain", OutputStatus.FAILED: "bad", OutputStatus.NOT_RUN: "muted"}


@dataclass(frozen=True, slots=True)
class Curve:
    """One row of a chart.

    Attributes:
        label: Name at the left.
        values: Values at equal distances; a missing one leaves a gap.
        figure: Text at the right, which says in figures what the curve shows.
        aside: Text after the figure.
        tone: Style class: ``plain``, ``bad`` or ``muted``.
    """

    label: str
    values: Sequence[float | None]
    figure: str
    aside: str = ""
    tone: str = "plain"


def curve_chart(
    title: str, curves: Sequence[Curve], *, ends: tuple[str, str] | None = None, one_scale: bool = False
) -> Markup:
    """Draw curves below each other, each from zero to its largest value.

    Args:
        title: Title of the chart, for readers who do not see the picture.
        curves: Rows from top to bottom.
        ends: What the horizontal axis begins and ends with, if all rows share one.
        one_scale: Whether all rows go up to the largest value of all.
    """
    tops = [max(_finite(curve.values), default=0.0) for curve in curves]
    if one_scale:
        tops = [max(tops, default=0.0)] * len(tops)
    rows = [_row(curve, top or 1.0) for curve, top in zip(curves, tops, strict=True)]
    if ends:
        axis = Markup('<li class="axis"><span class="track ends"><span>{}</span><span>{}</span></span></li>')
        rows.append(axis.format(*ends))
    return Markup('<ul class="chart curves" role="list" aria-label="{}">{}</ul>').format(title, Markup("").join(rows))


def divergence_by_position(outputs: Iterable[OutputValidation]) -> list[Curve]:
    """Return the divergence of each output from the reference by position in the text, for those that have it."""
    return [
        Curve(
            output.name,
            values,
            f"{figures.small(values[0])} → {figures.small(values[-1])}",
            f"at most {figures.small(max(_finite(values), default=None))}",
            _TONE[output.status],
        )
        for output in outputs
        if output.to_reference is not None and (values := output.to_reference.kl_by_position)
    ]


def memory_over_time(attempts: Iterable[AttemptResult]) -> list[Curve]:
    """Return the memory of each attempt over its time, for those whose memory was measured."""
    return [
        Curve(
            f"{attempt.task} #{attempt.number}" if attempt.number > 1 else attempt.task,
            attempt.memory_samples_bytes,
            figures.size(max(attempt.memory_samples_bytes)),
            f"in {figures.duration(len(attempt.memory_samples_bytes) * attempt.memory_sample_seconds)}",
            "bad" if attempt.outcome == "failed" else "plain",
        )
        for attempt in attempts
        if attempt.memory_samples_bytes
    ]


def _row(curve: Curve, largest: float) -> Markup:
    shapes = [_shapes(part, curve.tone) for part in _parts(curve.values, largest)]
    # The picture is stretched to the row; lines keep their width.
    track = Markup(
        '<span class="track" aria-hidden="true"><svg viewBox="0 0 100 100" preserveAspectRatio="none">{}</svg></span>'
    ).format(Markup("").join(shapes))
    aside = Markup(' <span class="aside">{}</span>').format(curve.aside) if curve.aside else ""
    row = Markup('<li><span class="label"><bdi>{}</bdi></span> {} <span class="figure">{}{}</span></li>')
    return row.format(curve.label, track, curve.figure, aside)


def _shapes(points: Sequence[tuple[float, float]], tone: str) -> Markup:
    line = " L".join(f"{x:.2f} {y:.2f}" for x, y in points)
    area = f"M{points[0][0]:.2f} 100 L{line} L{points[-1][0]:.2f} 100 Z"
    return Markup('<path class="area {0}" d="{1}"/><path class="curve {0}" d="M{2}"/>').format(tone, area, line)


def _parts(values: Sequence[float | None], largest: float) -> list[list[tuple[float, float]]]:
    """Return the points of each unbroken part of a curve, in percent of the row; a single value is a level line."""
    values = [*values, *values] if len(values) == 1 else values
    parts: list[list[tuple[float, float]]] = [[]]
    for number, value in enumerate(values):
        if value is None or not math.isfinite(value):
            parts.append([])
        else:
            parts[-1].append((100 * number / (len(values) - 1), 100 - 100 * value / largest))
    return [part for part in parts if part]


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
