"""The measured quality in the model card: a table with the sign-off, and Hugging Face's evaluation metadata (``model-index``).

The metadata's form is that of https://github.com/huggingface/hub-docs/blob/main/modelcard.md: a result per task and data set, with
metrics. It holds only outputs that passed, and only figures that say something about the model: perplexity of the built-in text does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slipway.results.report import figures
from slipway.results.report.document import Report
from slipway.texts import counted
from slipway.validation.comparisons import Check
from slipway.validation.findings import OutputValidation, ValidationReport
from slipway.validation.pictures import Sense


@dataclass(frozen=True, slots=True)
class Measure:
    """How a check is shown.

    Attributes:
        title: Its name for people.
        show: Function that formats value and limit.
    """

    title: str
    show: Callable[[float | None], str] = figures.small


_MEASURES = {
    "max_abs_diff": Measure("Largest difference"),
    "mean_kl": Measure("Mean KL divergence"),
    **{f"{each}.mean_kl": Measure(f"Mean KL divergence {each.place}") for each in Sense},
    "top1_agreement": Measure("Top-1 agreement", figures.share),
    "choice_agreement": Measure("Agreement of choices", figures.share),
    "relative_error": Measure("Relative error"),
    "cosine_distance": Measure("Cosine distance"),
    "perplexity_ratio": Measure("Perplexity, as a multiple of the reference's", figures.number),
    "adapter_strength_error": Measure("Error of the adapter's strength", figures.share),
    "tokens": Measure("Texts with other tokens", figures.number),
    "chat_template": Measure("Conversations with another prompt", figures.number),
}
"""Checks against the reference that the table shows, by name; the others are counted."""
_METRICS = (
    ("perplexity", "Perplexity"),
    ("mean_kl", "Mean KL divergence from the reference"),
    ("top1_agreement", "Top-1 agreement with the reference"),
    ("relative_error", "Relative error against the reference"),
    ("cosine_distance", "Cosine distance from the reference"),
)
_BUILT_IN = "python-documentation-and-library"
_HELD_OUT = "held-out-text"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: an output and one of its measures."""

    output: str
    measure: str
    value: str
    limit: str
    passed: bool


def rows(report: Report) -> list[Row]:
    """Return the table's lines, output by output; the last one of each counts the checks without a line of their own."""
    lines: list[Row] = []
    for output in report.outputs:
        shown = [
            (check, measure)
            for check in output.checks
            if check.against == "reference" and (measure := _measure(check)) is not None
        ]
        lines += [_row(output, check, measure) for check, measure in shown]
        others = [check for check in output.checks if all(check is not each for each, _ in shown)]
        if others:
            kept = sum(check.passed for check in others)
            lines.append(
                Row(output.name, "Other checks", f"{kept} kept", f"all {len(others)}", passed=kept == len(others))
            )
    return lines


def sign_off(report: Report) -> str:
    """Return the sentence that signs the table off, or says why it is not signed off; empty if nothing was validated."""
    validation = report.validation
    if validation is None or not validation.reference.engine.version:
        return ""
    date = f"{report.result.timestamp:%Y-%m-%d}"
    tool = " ".join(filter(None, ("Slipway", str(report.lineage.get("tools", {}).get("slipway", "")))))
    failed = [validation.output(name) for name in validation.failed_outputs]
    if failed:
        exceeded = ", ".join(output.name for output in failed if output.failed_checks)
        crashed = ", ".join(output.name for output in failed if not output.failed_checks)
        parts = (f"{exceeded} did not keep every limit" * bool(exceeded), f"{crashed} failed to run" * bool(crashed))
        return f"Not signed off: {'; '.join(filter(None, parts))}."
    if not validation.passed:
        return "Not signed off: no output could be run."
    passed = [output for output in report.outputs if output.passed]
    count = sum(len(output.checks) for output in passed)
    names = ", ".join(output.name for output in passed)
    not_run = f" Not run: {', '.join(validation.not_run_outputs)}." if validation.not_run_outputs else ""
    limits = "the 1 limit" if count == 1 else f"all {counted(count, 'limit')}"
    return f"Signed off by {tool} on {date} for export {report.result.export_id}: {names} kept {limits}.{not_run}"


def model_index(report: Report, task: str) -> list[dict[str, Any]]:
    """Return the metadata; empty if no output passed or none was compared.

    Args:
        report: The contents.
        task: Name of the model's task on model hubs; empty if it has none.
    """
    validation = report.validation
    if validation is None:
        return []
    metrics = [metric for output in report.outputs if output.passed for metric in _metrics(validation, output)]
    if not metrics:
        return []
    kind = task or "other"
    results = [{"task": {"type": kind}, "dataset": _dataset(report, validation), "metrics": metrics}]
    answers = [
        {"type": score.name, "value": score.value, "name": f"{score.name.replace('_', ' ')} ({output.name})"}
        for output in report.outputs
        if output.passed and output.answers is not None
        for score in output.answers.scores
        if score.value is not None
    ]
    if answers:
        results.append({"task": {"type": kind}, "dataset": _test_inputs(report), "metrics": answers})
    return [{"name": report.name, "results": results}]


def _test_inputs(report: Report) -> dict[str, Any]:
    digest = report.lineage.get("sources", {}).get("test_inputs", "")
    return {"type": "test-inputs", "name": "test inputs", **({"revision": digest} if digest else {})}


def _measure(check: Check) -> Measure | None:
    score = check.name.removeprefix("answers.").removesuffix("_loss")
    if score != check.name:
        return Measure(f"Loss of {score.replace('_', ' ')} on the test inputs", figures.share)
    return _MEASURES.get(check.name)


def _row(output: OutputValidation, check: Check, measure: Measure) -> Row:
    value = "not finite" if check.value is None else measure.show(check.value)
    words = {"<=": "at most", ">=": "at least"}[check.comparison]
    return Row(output.name, measure.title, value, f"{words} {measure.show(check.limit)}", check.passed)


def _metrics(validation: ValidationReport, output: OutputValidation) -> Iterator[dict[str, Any]]:
    values = {**(output.to_reference.model_dump() if output.to_reference else {}), "perplexity": output.perplexity}
    if not validation.inputs.held_out:
        del values["perplexity"]
    for kind, title in _METRICS:
        if values.get(kind) is not None:
            yield {"type": kind, "value": values[kind], "name": f"{title} ({output.name})"}


def _dataset(report: Report, validation: ValidationReport) -> dict[str, Any]:
    inputs = validation.inputs
    digest = report.lineage.get("sources", {}).get("heldout", "")
    return {
        "type": _HELD_OUT if inputs.held_out else _BUILT_IN,
        "name": inputs.text_source.partition(",")[0],
        **({"revision": digest} if inputs.held_out and digest else {}),
        "args": {
            "samples": inputs.samples,
            "sequence_length": inputs.sequence_length,
            "tokens_sha256": inputs.tokens_sha256,
        },
    }
