"""Draw bar charts as HTML lists whose bars are inline SVG: no script, no font, no further file.

Text is HTML and every horizontal position a percentage, so that a chart fits any width in the page's text size. The page's style
defines the colours and the wide and narrow layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

_BAR = 14
_CAP = 8
_MARK = 22
"""Heights in CSS pixels of a bar, of a whisker's ends and of a limit's mark."""
_MOST_STEPS = 6
"""Most labels of an axis, so that they fit on a phone."""
_LOWEST = 1e-9
"""Start of logarithmic axes: smaller values are rounding noise, and zero has no logarithm."""


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
    rows = [_row(bar, scale=scale, ticks=ticks, show=show) for bar in bars]
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


def _finite(bars: Sequence[Bar]) -> list[float]:
    values = [value for bar in bars for value in (bar.value, bar.limit, *(bar.range or ())) if value is not None]
    return [value for value in values if math.isfinite(value)]


def _log_scale(bars: Sequence[Bar]) -> _Scale:
    values = [max(value, _LOWEST) for value in _finite(bars)] or [1.0]
    low = math.floor(math.log10(min(values)) - 0.2)  # so that the smallest bar is visible
    return _Scale(low=low, high=max(math.ceil(math.log10(max(values))), low + 1), log=True)


def _linear_scale(bars: Sequence[Bar]) -> _Scale:
    return _Scale(low=0.0, high=max([*_finite(bars), 0.0]) or 1.0, log=False)


def _decades(scale: _Scale) -> list[int]:
    """Return the exponents of the labelled powers of ten."""
    step = max(1, math.ceil((scale.high - scale.low) / _MOST_STEPS))
    return list(range(int(scale.low), int(scale.high) + 1, step))


def _axis(scale: _Scale, ticks: Sequence[int]) -> Markup:
    label = Markup('<text x="{:.2f}%" y="12" text-anchor="middle">1e{}</text>')
    labels = Markup("").join(label.format(scale.x(10.0**exponent), exponent) for exponent in ticks)
    return Markup('<li class="axis" aria-hidden="true"><span class="track"><svg>{}</svg></span></li>').format(labels)


def _row(bar: Bar, *, scale: _Scale, ticks: Sequence[int], show: Callable[[float | None], str]) -> Markup:
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
