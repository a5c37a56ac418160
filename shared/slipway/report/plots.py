"""Bar charts as inline SVG: no script, no font, no file of their own; colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

_WIDTH = 760
_LABEL = 150
_VALUE = 150
_ROW = 26
_BAR = 14
_AXIS = 22
_LOWEST = 1e-9
"""Logarithmic axes start here: what is smaller is rounding noise, and zero has no logarithm."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a chart.

    Attributes:
        label: Name at the left.
        value: Length of the bar; None draws none.
        tone: Style class: ``good``, ``bad``, ``plain`` or ``muted``.
        limit: Drawn as a mark across the row.
        note: Shown instead of the figure when there is no value.
        range: Where the value scatters, drawn as a whisker.
        remark: Shown behind the figure.
    """

    label: str
    value: float | None
    tone: str = "plain"
    limit: float | None = None
    note: str = ""
    range: tuple[float, float] | None = None
    remark: str = ""


def bar_chart(title: str, bars: Sequence[Bar], *, show: Callable[[float | None], str], log: bool = False) -> Markup:
    """Horizontal bars, one per row, the figure written at the right.

    Args:
        title: What is shown, for readers who do not see the picture.
        bars: Rows from top to bottom.
        show: Writes a figure.
        log: Logarithmic axis with a line per decade; otherwise linear from zero.
    """
    scale = _log_scale(bars) if log else _linear_scale(bars)
    height = _ROW * len(bars) + (_AXIS if log else 6)
    parts = [
        Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title>').format(
            _WIDTH, height, title, title
        )
    ]
    if log:
        parts.append(_decades(scale, height))
    parts += [_row(bar, _ROW * index, scale=scale, show=show) for index, bar in enumerate(bars)]
    return Markup("").join([*parts, Markup("</svg>")])


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    log: bool

    def x(self, value: float) -> float:
        """Horizontal position of a value."""
        room = _WIDTH - _LABEL - _VALUE
        if self.log:
            part = (math.log10(max(value, 10**self.low)) - self.low) / (self.high - self.low)
        else:
            part = value / self.high
        return _LABEL + room * min(1.0, max(0.0, part))


def _finite(bars: Sequence[Bar]) -> list[float]:
    values = [value for bar in bars for value in (bar.value, bar.limit, *(bar.range or ())) if value is not None]
    return [value for value in values if math.isfinite(value)]


def _log_scale(bars: Sequence[Bar]) -> _Scale:
    values = [max(value, _LOWEST) for value in _finite(bars)] or [1.0]
    low = math.floor(math.log10(min(values)) - 0.2)  # so that the smallest bar is still seen
    return _Scale(low=low, high=max(math.ceil(math.log10(max(values))), low + 1), log=True)


def _linear_scale(bars: Sequence[Bar]) -> _Scale:
    return _Scale(low=0.0, high=max([*_finite(bars), 0.0]) or 1.0, log=False)


def _decades(scale: _Scale, height: int) -> Markup:
    line = Markup('<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="0" y2="{1}"/>')
    text = Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>')
    step = max(1, round((scale.high - scale.low) / 8))
    marks = []
    for exponent in range(int(scale.low), int(scale.high) + 1, step):
        x = scale.x(10.0**exponent)
        marks += [line.format(x, height - _AXIS + 4), text.format(x, height - 4, f"1e{exponent}")]
    return Markup("").join(marks)


def _row(bar: Bar, top: int, *, scale: _Scale, show: Callable[[float | None], str]) -> Markup:
    middle = top + _ROW / 2
    parts = [
        Markup('<text class="label" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
            _LABEL - 8, middle + 4, bar.label
        )
    ]
    if bar.value is not None and math.isfinite(bar.value):
        parts.append(
            Markup('<rect class="bar {}" x="{}" y="{:.1f}" width="{:.1f}" height="{}" rx="2"/>').format(
                bar.tone, _LABEL, middle - _BAR / 2, max(1.0, scale.x(bar.value) - _LABEL), _BAR
            )
        )
    if bar.range is not None:
        low, high = (scale.x(value) for value in bar.range)
        path = Markup(
            '<path class="whisker" d="M{0:.1f} {2:.1f}V{3:.1f}M{0:.1f} {4:.1f}H{1:.1f}M{1:.1f} {2:.1f}V{3:.1f}"/>'
        )
        parts.append(path.format(low, high, middle - 4, middle + 4, middle))
    if bar.limit is not None:
        parts.append(
            Markup('<line class="limit" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>').format(
                scale.x(bar.limit), middle - _BAR / 2 - 4, middle + _BAR / 2 + 4
            )
        )
    figure = bar.note if bar.value is None and bar.note else show(bar.value) + bar.remark
    parts.append(
        Markup('<text class="figure" x="{}" y="{:.1f}">{}</text>').format(_WIDTH - _VALUE + 8, middle + 4, figure)
    )
    return Markup("").join(parts)
