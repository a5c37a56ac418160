"""Draw bars and curves, one per row, as HTML lists with inline SVG: no script, no font, no further file.

Text is HTML and every horizontal position a percentage, so that a chart fits any width in the page's text size. The page's style
defines the colours and the wide and narrow layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from slipway.results.report import figures
from slipway.results.result import AttemptResult
from slipway.validation.findings import OutputStatus, OutputValidation

_BAR = 14
_CAP = 8
_MARK = 22
"""Heights in CSS pixels of a bar, of a whisker's ends and of a limit's mark."""
_MOST_STEPS = 6
"""Most labels of an axis, so that they fit on a phone."""
_LOWEST = 1e-9
"""Start of logarithmic axes: smaller values are rounding noise, and zero has no logarithm."""

_TONE = {OutputStatus.PASSED: "plain", OutputStatus.FAILED: "bad", OutputStatus.NOT_RUN: "muted"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a chart.

    Attributes:
        label: Name at the left.
        value: Length of the bar; None draws none.
        tone: Style class: ``good``, ``bad``, ``plain`` or ``muted``.
        limit: Limit, drawn as a mark across the row and written beside the figure.
        note: Text in place of the figure if there is no value.
        range: Range in which the value scatters, drawn as a whisker and written beside the figure.
        remark: Text after the figure.
    """

    label: str
    value: float | None
    tone: str = "plain"
    limit: float | None = None
    note: str = ""
    range: tuple[float, float] | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with its heading and a sentence that explains it."""

    heading: str
    caption: str
    plot: Markup


def bar_chart(title: str, bars: Sequence[Bar], *, show: Callable[[float | None], str], log: bool = False) -> Markup:
    """Draw horizontal bars, one per row, with the figure at the right.

    Args:
        title: Title of the chart, for readers who do not see the picture.
        bars: Rows from top to bottom.
        show: Function that formats a figure.
        log: Whether the axis is logarithmic with a line per decade; otherwise it is linear from zero.
    """
    scale = _log_scale(bars) if log else _linear_scale(bars)
    ticks = _decades(scale) if log else []
    rows = [_bar_row(bar, scale=scale, ticks=ticks, show=show) for bar in bars]
    if ticks:
        rows.append(_axis(scale, ticks))
    return Markup('<ul class="chart" role="list" aria-label="{}">{}</ul>').format(title, Markup("").join(rows))


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    log: bool

    def x(self, value: float) -> float:
        """Return the horizontal position of a value, in percent of the axis."""
        if self.log:
            part = (math.log10(max(value, 10**self.low)) - self.low) / (self.high - self.low)
        else:
            part = value / self.high
        return 100 * min(1.0, max(0.0, part))


def _bar_values(bars: Sequence[Bar]) -> list[float]:
    values = [value for bar in bars for value in (bar.value, bar.limit, *(bar.range or ())) if value is not None]
    return [value for value in values if math.isfinite(value)]


def _log_scale(bars: Sequence[Bar]) -> _Scale:
    values = [max(value, _LOWEST) for value in _bar_values(bars)] or [1.0]
    low = math.floor(math.log10(min(values)) - 0.2)  # so that the smallest bar is visible
    return _Scale(low=low, high=max(math.ceil(math.log10(max(values))), low + 1), log=True)


def _linear_scale(bars: Sequence[Bar]) -> _Scale:
    return _Scale(low=0.0, high=max([*_bar_values(bars), 0.0]) or 1.0, log=False)


def _decades(scale: _Scale) -> list[int]:
    """Return the exponents of the labelled powers of ten."""
    step = max(1, math.ceil((scale.high - scale.low) / _MOST_STEPS))
    return list(range(int(scale.low), int(scale.high) + 1, step))


def _axis(scale: _Scale, ticks: Sequence[int]) -> Markup:
    label = Markup('<text x="{:.2f}%" y="12" text-anchor="middle">1e{}</text>')
    labels = Markup("").join(label.format(scale.x(10.0**exponent), exponent) for exponent in ticks)
    return Markup('<li class="axis" aria-hidden="true"><span class="track"><svg>{}</svg></span></li>').format(labels)


def _bar_row(bar: Bar, *, scale: _Scale, ticks: Sequence[int], show: Callable[[float | None], str]) -> Markup:
    grid = Markup('<line class="grid" x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="100%"/>')
    drawn = [grid.format(scale.x(10.0**exponent)) for exponent in ticks]
    if bar.value is not None and math.isfinite(bar.value):
        shape = Markup('<rect class="bar {}" y="50%" width="{:.2f}%" height="{}" rx="2" transform="translate(0 {})"/>')
        drawn.append(shape.format(bar.tone, max(0.2, scale.x(bar.value)), _BAR, -_BAR / 2))
    if bar.range is not None:
        drawn.append(_whisker(*(scale.x(end) for end in bar.range)))
    if bar.limit is not None:
        drawn.append(_upright("limit", scale.x(bar.limit), _MARK))
    track = Markup('<span class="track" aria-hidden="true"><svg>{}</svg></span>').format(Markup("").join(drawn))
    row = Markup('<li><span class="label"><bdi>{}</bdi></span> {} {}</li>')
    return row.format(bar.label, track, _figure(bar, show))


def _whisker(low: float, high: float) -> Markup:
    line = Markup('<line class="whisker" x1="{:.2f}%" x2="{:.2f}%" y1="50%" y2="50%"/>').format(low, high)
    return Markup("").join([line, _upright("whisker", low, _CAP), _upright("whisker", high, _CAP)])


def _upright(kind: str, x: float, height: float) -> Markup:
    """Draw a vertical mark around the middle of a row."""
    mark = Markup('<rect class="{}" x="{:.2f}%" y="50%" width="2" height="{}" transform="translate(-1 {})"/>')
    return mark.format(kind, x, height, -height / 2)


def _figure(bar: Bar, show: Callable[[float | None], str]) -> Markup:
    """Write the figure as text, with its range and limit beside it."""
    text = bar.note if bar.value is None and bar.note else show(bar.value) + bar.remark
    asides = []
    if bar.range is not None:
        asides.append(" – ".join(show(end) for end in bar.range))
    if bar.limit is not None:
        asides.append(f"limit {show(bar.limit)}")
    beside = Markup("").join(Markup(' <span class="aside">{}</span>').format(aside) for aside in asides)
    return Markup('<span class="figure">{}{}</span>').format(text, beside)


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
    tops = [max(_finite_values(curve.values), default=0.0) for curve in curves]
    if one_scale:
        tops = [max(tops, default=0.0)] * len(tops)
    rows = [_curve_row(curve, top or 1.0) for curve, top in zip(curves, tops, strict=True)]
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
            f"at most {figures.small(max(_finite_values(values), default=None))}",
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


def _curve_row(curve: Curve, largest: float) -> Markup:
    shapes = [_curve_shapes(part, curve.tone) for part in _curve_parts(curve.values, largest)]
    # The picture is stretched to the row; lines keep their width.
    track = Markup(
        '<span class="track" aria-hidden="true"><svg viewBox="0 0 100 100" preserveAspectRatio="none">{}</svg></span>'
    ).format(Markup("").join(shapes))
    aside = Markup(' <span class="aside">{}</span>').format(curve.aside) if curve.aside else ""
    row = Markup('<li><span class="label"><bdi>{}</bdi></span> {} <span class="figure">{}{}</span></li>')
    return row.format(curve.label, track, curve.figure, aside)


def _curve_shapes(points: Sequence[tuple[float, float]], tone: str) -> Markup:
    line = " L".join(f"{x:.2f} {y:.2f}" for x, y in points)
    area = f"M{points[0][0]:.2f} 100 L{line} L{points[-1][0]:.2f} 100 Z"
    return Markup('<path class="area {0}" d="{1}"/><path class="curve {0}" d="M{2}"/>').format(tone, area, line)


def _curve_parts(values: Sequence[float | None], largest: float) -> list[list[tuple[float, float]]]:
    """Return the points of each unbroken part of a curve, in percent of the row; a single value is a level line."""
    values = [*values, *values] if len(values) == 1 else values
    parts: list[list[tuple[float, float]]] = [[]]
    for number, value in enumerate(values):
        if value is None or not math.isfinite(value):
            parts.append([])
        else:
            parts[-1].append((100 * number / (len(values) - 1), 100 - 100 * value / largest))
    return [part for part in parts if part]


def _finite_values(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
