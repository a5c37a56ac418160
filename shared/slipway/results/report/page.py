"""Render the report as one self-contained HTML page: no script, no font, no picture from elsewhere.

Some of it is read from what tasks reported: the text of a calibration, and graphs before and after their optimization.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from markupsafe import Markup
from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, ValidationError

from slipway.results.report import figures
from slipway.results.report.charts import Bar, Chart, bar_chart, curve_chart, divergence_by_position, memory_over_time
from slipway.results.report.document import Report
from slipway.results.report.environment import html_environment
from slipway.results.report.figures import describe_comparison
from slipway.results.report.parts import fold_parts
from slipway.results.report.survival import survival_charts, worst_modules
from slipway.results.result import AttemptResult
from slipway.texts import printable
from slipway.validation.comparisons import Check
from slipway.validation.findings import OutputStatus, OutputValidation

_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

_TONE = {OutputStatus.PASSED: "good", OutputStatus.FAILED: "bad", OutputStatus.NOT_RUN: "muted"}
VERDICTS = {
    "passed": "passed",
    "failed": "failed",
    "not_run": "not run here",
    "not_validated": "not validated",
}
NOT_MADE = {"failed": "not made", "skipped": "not made", "cancelled": "cancelled", "not_run": "not run"}
"""Text in place of a verdict for an output that was not made, by the state of its task."""


class _Vocabulary(BaseModel):
    coverage: _Share


class _Overlap(BaseModel):
    overlap: _Share
    passages_left_out: NonNegativeInt


class _Lengths(BaseModel):
    shortest: NonNegativeInt
    median: NonNegativeInt | float
    longest: NonNegativeInt


class CalibrationProfile(BaseModel):
    """The text of a calibration: its origin, amount, languages, and what it has in common with the held-out text (None: not compared)."""

    source: Annotated[str, Field(max_length=500)]
    passages: NonNegativeInt
    tokens: NonNegativeInt
    passage_tokens: _Lengths
    scripts: dict[str, _Share]
    vocabulary: _Vocabulary
    heldout: _Overlap | None = None

    @property
    def languages(self) -> str:
        """Return the scripts with their shares of the letters, for people."""
        return ", ".join(f"{printable(name).capitalize()} {share:.0%}" for name, share in self.scripts.items())


def calibration_profile(lineage: Mapping[str, Any]) -> CalibrationProfile | None:
    """Return the profile that a task recorded in a form that is known here; None if there is none."""
    for task in lineage.get("tasks", ()):
        try:
            return CalibrationProfile.model_validate(task["profile"])
        except (KeyError, TypeError, ValidationError):
            continue
    return None


class GraphNodes(BaseModel):
    """A task's graphs: the number of nodes, their size without weights, how often each operator occurs, and how fast they are if measured."""

    nodes: NonNegativeInt
    size_bytes: NonNegativeInt
    operators: dict[str, NonNegativeInt]
    prefill_ms: NonNegativeFloat | None = None
    decode_ms: NonNegativeFloat | None = None


class Optimization(BaseModel):
    """A task's graphs before and after their optimization."""

    before: GraphNodes
    after: GraphNodes

    @property
    def times(self) -> dict[str, str]:
        """Return what was measured before and after, in milliseconds, by its name for people."""
        texts = {}
        for title, name in (("Prompt", "prefill_ms"), ("Token", "decode_ms")):
            before, after = getattr(self.before, name), getattr(self.after, name)
            if before is not None and after is not None:
                texts[title] = f"{before:.4g} → {after:.4g} ms"
        return texts


def optimizations(lineage: Mapping[str, Any]) -> Iterator[tuple[str, Optimization]]:
    """Yield task and nodes of each task that recorded them in a form that is known here."""
    for task in lineage.get("tasks", ()):
        try:
            yield str(task["id"]), Optimization.model_validate(task["statistics"])
        except (KeyError, TypeError, ValidationError):
            continue


def page(report: Report) -> str:
    """Render the whole page."""
    template = html_environment().get_template("report.html.j2")
    attempts = fold_parts(report.result.attempts)
    return template.render(
        **common(report),
        verdict=_verdict(report),
        purpose=_purpose(report),
        first_plot=_first_plot(report),
        fastest=_fastest(report),
        charts=_charts(report),
        durations=_durations(attempts),
        memory=_memory(attempts),
        attempts=[(attempt, _params(attempt)) for attempt in attempts],
        tools=sorted(report.lineage.get("tools", {}).items()),
        sources=sorted(report.lineage.get("sources", {}).items()),
        graphs=list(optimizations(report.lineage)),
        calibration=calibration_profile(report.lineage),
        worst_modules=worst_modules,
    )


def common(report: Report) -> dict[str, Any]:
    """Return the variables that the templates of page and card have in common."""
    return {
        "measured_on": describe_machine(report),
        "report": report,
        "result": report.result,
        "validation": report.validation,
        "compared": describe_comparison(report.validation),
        "verdicts": VERDICTS,
        "not_made": NOT_MADE,
    }


def _verdict(report: Report) -> tuple[str, str]:
    """Return the style class and sentence at the top of the page; amber if nothing shows that the base model is the right one."""
    if not report.result.success:
        return "bad", "The export failed."
    tone, sentence = _outputs_verdict(report)
    instead = {value.requested: name for name, value in report.result.formats.items() if value.requested}
    if instead:
        swapped = ", ".join(f"{name} instead of {asked}" for asked, name in instead.items())
        tone, sentence = "amber", f"{sentence} Delivered: {swapped}, which failed."
    base = report.result.base_match
    if base is None or base.verdict == "green":
        return tone, sentence
    return "amber", f"{sentence} {base.headline}."


def _outputs_verdict(report: Report) -> tuple[str, str]:
    if report.validation is None:
        return "muted", "The export succeeded. Nothing was validated."
    not_run, failed = report.validation.not_run_outputs, report.validation.failed_outputs
    if failed:
        kept = "was" if len(failed) == 1 else "were"
        return (
            "amber",
            f"The export succeeded. {', '.join(failed)} failed validation and {kept} kept, as validation.on_failure asks.",
        )
    if not report.validation.passed:
        reasons = {output.status_reason for output in report.validation.outputs}
        why = reasons.pop() if len(reasons) == 1 else "none of the outputs can be run on this machine"
        return "muted", f"The export succeeded. Nothing was validated: {why}."
    if not_run:
        return "good", f"Every output that runs on this machine passed validation. Not run here: {', '.join(not_run)}."
    return "good", "Every output passed validation."


def _charts(report: Report) -> list[Chart]:
    if report.validation is None:
        return []
    outputs, words, reference = (
        report.outputs,
        describe_comparison(report.validation),
        report.reference.partition(",")[0],
    )
    value = "logit" if words.distance.name == "mean_kl" else "value"
    behaviour = [
        Chart(
            "Divergence from the original" if report.result.plain else "Divergence from the fine-tuned model",
            f"{words.distance_words} of {words.what} against {reference}, logarithmic; the mark is the limit.",
            _logits_chart(words.title, outputs, words.distance.name),
        ),
        Chart(
            f"Largest difference of a {value}",
            f"Against {reference}, logarithmic; the mark is the limit where there is one.",
            _logits_chart(f"Largest difference of a {value}", outputs, "max_abs_diff"),
        ),
    ]
    positions = divergence_by_position(outputs)
    if positions:
        caption = f"{words.distance_words} by position in the text, mean over all windows, each curve in its own scale from zero; where one rises, errors add up."
        plot = curve_chart("Divergence by position", positions, ends=("first token", "last token"))
        behaviour.insert(1, Chart("Divergence by position", caption, plot))
    compared_any = any(output.to_reference is not None for output in outputs)
    return [*(behaviour if compared_any else ()), *survival_charts(outputs), *_speed_charts(outputs)]


def _logits_chart(title: str, outputs: Iterable[OutputValidation], measure: str) -> Markup:
    bars = []
    for output in outputs:
        value = getattr(output.to_reference, measure) if output.to_reference else None
        limit = _limit(output.checks, measure)
        bars.append(Bar(output.name, value, tone=_TONE[output.status], limit=limit, note=_absence(output)))
    return bar_chart(title, bars, show=figures.small, log=True)


def _speed_charts(outputs: Sequence[OutputValidation]) -> list[Chart]:
    timed = [(output, output.speed) for output in outputs if output.speed is not None]
    measured = [output for output in outputs if output.memory is not None]
    charts = []
    if timed:
        generation = [
            _speed_bar(output.name, speed.decode_tokens_per_second, speed.decode_range, stable=speed.decode_stable)
            for output, speed in timed
        ]
        prompt = [
            _speed_bar(output.name, speed.prefill_ms, speed.prefill_ms_range, stable=speed.prefill_stable)
            for output, speed in timed
        ]
        scatter = "the whisker is the range of most rounds; a figure that scatters too much is unstable."
        length = timed[0][1].prefill_tokens
        charts = [
            Chart(
                "Prompt",
                f"Time of one pass over an input of length {length}, batch 1; shorter is better; {scatter}",
                bar_chart("Prompt", prompt, show=figures.milliseconds),
            ),
        ]
        if any(speed.decode_tokens_per_second is not None for _, speed in timed):
            caption = f"Tokens per second, one at a time with the KV cache, batch 1; longer is better; {scatter}"
            charts.insert(0, Chart("Generation", caption, bar_chart("Generation", generation, show=figures.rate)))
    if measured:
        bars = [Bar(output.name, output.memory.peak_rss_bytes if output.memory else None) for output in measured]
        caption = "Peak resident memory of the process that ran the model, libraries included."
        charts.append(Chart("Memory", caption, bar_chart("Memory", bars, show=figures.size)))
    return charts


def _speed_bar(name: str, value: float | None, limits: tuple[float, float] | None, *, stable: bool) -> Bar:
    unstable = value is not None and not stable
    return Bar(
        name, value, tone="muted" if unstable else "plain", range=limits, remark=", unstable" if unstable else ""
    )


def _limit(checks: Iterable[Check], measure: str) -> float | None:
    """Return the limit of a figure against the reference; None if it has none."""
    limits = (check.limit for check in checks if check.name == measure and check.against == "reference")
    return next(limits, None)


def _absence(output: OutputValidation) -> str:
    return VERDICTS[output.status.value] if output.status is not OutputStatus.PASSED else ""


def _durations(attempts: Iterable[AttemptResult]) -> Markup:
    """Chart the duration of each attempt, in the order of the attempts."""
    bars = [
        Bar(
            f"{attempt.task} #{attempt.number}" if attempt.number > 1 else attempt.task,
            None if attempt.reused else attempt.duration_seconds,
            tone="bad" if attempt.outcome == "failed" else "plain",
            note="reused" if attempt.reused else "",
        )
        for attempt in attempts
    ]
    return bar_chart("Duration of each attempt", bars, show=figures.duration)


def _memory(attempts: Iterable[AttemptResult]) -> Markup | None:
    """Chart the memory of each attempt over its time; None if none was measured."""
    curves = memory_over_time(attempts)
    return curve_chart("Memory of each attempt over time", curves, one_scale=True) if curves else None


def _params(attempt: AttemptResult) -> list[tuple[str, str]]:
    return [(name, _plain(value)) for name, value in sorted(attempt.params.items())]


def _plain(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # messages carry numbers as doubles
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def describe_machine(report: Report) -> str:
    """Describe the machine on which speeds were measured; empty if none were, or in a report of a version that did not say."""
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
    """Return the output with the fastest prompt, for its tile."""
    speed = report.result.inference_speed_ms
    return next((each for each in report.timed if each.speed is not None and each.speed.prefill_ms == speed), None)


def _first_plot(report: Report) -> Chart | None:
    """Chart the sizes, with the speeds beside them."""
    if not report.result.formats:
        return None
    bars = [
        Bar(name, value.size_bytes, remark=_speed_beside(report, name)) for name, value in report.result.formats.items()
    ]
    caption = "All files of each folder."
    ratios = [each.speed for each in report.timed if each.speed and each.speed.prefill_speedup]
    if ratios:
        what = "generating" if any(each.decode_speedup for each in ratios) else "reading a text"
        caption += f" Speed: {what}, as a multiple of the original in PyTorch, timed in turn."
    caption = f"{caption} {describe_machine(report)}"
    return Chart("Size", caption.strip(), bar_chart("Size and speed", bars, show=figures.size))


def _speed_beside(report: Report, name: str) -> str:
    output = report.validated(name)
    speed = output.speed if output else None
    ratio = (speed.decode_speedup or speed.prefill_speedup) if speed else None
    return f", {figures.times(ratio).partition(' (')[0]} as fast" if ratio else ""
