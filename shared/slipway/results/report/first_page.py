"""The first page of the report, which is sent alone: what was made, whether it is good, how much smaller and faster, on which machine."""

from __future__ import annotations

from typing import Any

from slipway.results.report import figures
from slipway.results.report.document import Report
from slipway.results.report.plots import Bar, Chart, bar_chart
from slipway.validation.findings import OutputValidation


def first_page(report: Report) -> dict[str, Any]:
    """Return the template's variables of the first page."""
    return {"purpose": _purpose(report), "first_plot": _plot(report), "fastest": _fastest(report)}


def measured_on(report: Report) -> str:
    """Say on which machine speeds were measured; empty if none was, or the report is of a version that did not say."""
    timed, machine = report.timed, report.validation.machine if report.validation else None
    if not timed or machine is None:
        return ""
    threads = sorted({output.speed.threads for output in timed if output.speed})
    used = " or ".join(map(str, threads))
    return f"Measured with {used} thread{'' if threads == [1] else 's'} on {machine.said}."


def _purpose(report: Report) -> str:
    family = report.validation.inputs.family if report.validation else ""
    return f"Kind of model: {family}." if family else ""


def _fastest(report: Report) -> OutputValidation | None:
    """Return the output that the tile of the fastest prompt is about."""
    speed = report.result.inference_speed_ms
    return next((each for each in report.timed if each.speed is not None and each.speed.prefill_ms == speed), None)


def _plot(report: Report) -> Chart | None:
    """Chart the sizes, with the speeds beside them."""
    if not report.result.formats:
        return None
    bars = [Bar(name, value.size_bytes, remark=_speed(report, name)) for name, value in report.result.formats.items()]
    caption = "All files of each folder."
    ratios = [each.speed for each in report.timed if each.speed and each.speed.prefill_speedup]
    if ratios:
        what = "generating" if any(each.decode_speedup for each in ratios) else "reading a text"
        caption += f" Speed: {what}, as a multiple of the original in PyTorch, timed in turn."
    caption = f"{caption} {measured_on(report)}"
    return Chart("Size", caption.strip(), bar_chart("Size and speed", bars, show=figures.size))


def _speed(report: Report, name: str) -> str:
    found = report.validated(name)
    speed = found.speed if found else None
    ratio = (speed.decode_speedup or speed.prefill_speedup) if speed else None
    return f", {figures.times(ratio).partition(' (')[0]} as fast" if ratio else ""
