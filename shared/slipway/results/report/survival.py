"""Show what each output holds of the adapter, layer by layer: a row per output, a dot per module, the layers from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from slipway.results.report import figures
from slipway.results.report.charts import Chart
from slipway.validation.findings import OutputValidation
from slipway.validation.survival import AdapterSurvival, ModuleSurvival, worst

_TOP = 1.5
_WORST = 5

_HEIGHT = 64
"""Height of a row in CSS pixels, as in the page's style."""
_EDGE = 6
_RADIUS = 2.5
_MOST_LABELS = 8


def survival_charts(outputs: Sequence[OutputValidation]) -> list[Chart]:
    """Return the chart of the outputs in whose layers the adapter was compared; none if there is no such output."""
    compared = [(output.name, output.survival) for output in outputs if output.survival and output.survival.by_layer()]
    if not compared:
        return []
    rows = [LayerRow(name, _dots(survival), _figure(survival)) for name, survival in compared]
    caption = (
        "A dot for each adapted module, the layers from left to right: the share of the adapter's update that its stored weight holds. "
        "The lines are 0 (the adapter is lost) and 1 (all of it). The cosine says how much of a weight's change is the adapter, and how "
        "much rounding."
    )
    return [
        Chart("The adapter in each layer", caption, layer_chart("Adapter by layer", rows, top=_TOP, lines=(0.0, 1.0)))
    ]


def worst_modules(output: OutputValidation) -> tuple[ModuleSurvival, ...]:
    """Return the modules of an output that hold least of the adapter: those that fail, or a few."""
    survival = output.survival
    if survival is None:
        return ()
    known = [each for each in survival.modules if each.strength is not None or each.fault]
    return worst(survival.faulty or known, max(_WORST, min(len(survival.faulty), 4 * _WORST)))


def _dots(survival: AdapterSurvival) -> list[Dot]:
    return [
        Dot(each.layer, each.strength, good=not each.fault)
        for each in survival.modules
        if each.layer is not None and each.strength is not None
    ]


def _figure(survival: AdapterSurvival) -> str:
    strengths = sorted(each.strength for each in survival.modules if each.strength is not None)
    cosines = sorted(each.cosine for each in survival.modules if each.cosine is not None)
    if not strengths:
        return "–"
    middle = f", cosine {figures.number(cosines[len(cosines) // 2])}" if cosines else ""
    return f"{figures.number(strengths[0])} to {figures.number(strengths[-1])}{middle}"


@dataclass(frozen=True, slots=True)
class Dot:
    """One module's value.

    Attributes:
        layer: Number of its layer.
        value: Its value; it is drawn at the nearest end if it is outside of the axis.
        good: Whether it keeps its limit.
    """

    layer: int
    value: float
    good: bool = True


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One output: its name, its dots, and the figure at the right."""

    label: str
    dots: Sequence[Dot]
    figure: str


def layer_chart(title: str, rows: Sequence[LayerRow], *, top: float, lines: Sequence[float]) -> Markup:
    """Draw the rows with a common axis of layers.

    Args:
        title: Title of the chart, for readers who do not see the picture.
        rows: Rows from top to bottom.
        top: Value at the upper end; the lower end is 0.
        lines: Values with a line.
    """
    last = max((dot.layer for row in rows for dot in row.dots), default=0)
    drawn = [_row(row, last=last, top=top, lines=lines) for row in rows]
    return Markup('<ul class="chart" role="list" aria-label="{}">{}</ul>').format(
        title, Markup("").join([*drawn, _axis(last)])
    )


def _row(row: LayerRow, *, last: int, top: float, lines: Sequence[float]) -> Markup:
    line = Markup('<line class="grid" x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/>')
    dot = Markup('<circle class="bar {}" cx="{:.2f}%" cy="{:.1f}" r="{}"/>')
    shapes = [line.format(_y(value, top)) for value in lines]
    ordered = sorted(row.dots, key=lambda each: not each.good)  # what fails lies on top
    shapes += [
        dot.format("plain" if each.good else "bad", _x(each.layer, last), _y(each.value, top), _RADIUS)
        for each in ordered
    ]
    track = Markup('<span class="track" aria-hidden="true"><svg>{}</svg></span>').format(Markup("").join(shapes))
    whole = Markup('<li class="layers"><span class="label"><bdi>{}</bdi></span> {} <span class="figure">{}</span></li>')
    return whole.format(row.label, track, row.figure)


def _axis(last: int) -> Markup:
    step = max(1, -(-last // _MOST_LABELS))
    label = Markup('<text x="{:.2f}%" y="12" text-anchor="middle">{}</text>')
    labels = Markup("").join(label.format(_x(layer, last), layer) for layer in range(0, last + 1, step))
    return Markup('<li class="axis" aria-hidden="true"><span class="track"><svg>{}</svg></span></li>').format(labels)


def _x(layer: int, last: int) -> float:
    return 2 + 96 * layer / last if last else 50.0


def _y(value: float, top: float) -> float:
    return _EDGE + (_HEIGHT - 2 * _EDGE) * (1 - min(1.0, max(0.0, value / top)))
