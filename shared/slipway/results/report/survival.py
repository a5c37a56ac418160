"""Show what each output holds of the adapter, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from slipway.results.report import figures
from slipway.results.report.layers import Dot, LayerRow, layer_chart
from slipway.results.report.plots import Chart
from slipway.validation.findings import OutputValidation
from slipway.validation.survival import AdapterSurvival, ModuleSurvival, worst

_TOP = 1.5
_WORST = 5


def survival_charts(outputs: Sequence[OutputValidation]) -> list[Chart]:
    """Return the chart of the outputs in whose layers the adapter was compared; none if there is no such output."""
    found = [(output.name, output.survival) for output in outputs if output.survival and output.survival.by_layer()]
    if not found:
        return []
    rows = [LayerRow(name, _dots(survival), _figure(survival)) for name, survival in found]
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
