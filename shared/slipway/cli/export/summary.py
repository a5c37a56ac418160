"""Show the result as a table, with warnings, recoveries and the error below it; other tables share its columns of measurements."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from slipway.results.report import figures
from slipway.results.report.figures import MISSING
from slipway.results.result import ExportResult, FailedFormat, FormatResult
from slipway.sizes import format_size
from slipway.terminal.columns import Column, FittedTable, Prose
from slipway.terminal.console import unbroken_line

FIGURE_COLUMNS = (
    Column("KL", rank=4, right=True),
    Column("top-1", rank=5, right=True),
    Column("prefill", rank=7, right=True),
    Column("decode", rank=6, right=True),
    Column("memory", rank=8, right=True),
)

_STYLES = {
    "passed": "green",
    "failed": "red",
    "not_run": "yellow",
    "not_validated": "dim",
    "skipped": "red",
    "cancelled": "yellow",
}

_COLUMNS = (
    Column("format", style="bold"),
    Column("state"),
    Column("size", rank=1, right=True),
    Column("smaller by", rank=3, right=True),
    *FIGURE_COLUMNS,
    Column("merged", rank=9, right=True),
)
_REASON = Column("reason", rank=2)
_UNMADE = (("not made ", "red"), ("not run ", "yellow"))
"""Labels of outputs that were not made: failed ones, and unsupported ones."""


def figure_cells(entry: FormatResult) -> tuple[str, ...]:
    """Return one cell for each of the columns."""
    memory = entry.memory_usage_mb
    return (
        _distance(entry),
        _agreement(entry),
        figures.prompt_speed(entry),
        figures.generation_speed(entry),
        figures.MISSING if memory is None else format_size(1e6 * memory),
    )


def _distance(entry: FormatResult) -> str:
    """Format the KL; for values, which have no KL, the relative error with its name."""
    if entry.relative_error is not None:
        return f"{entry.relative_error:.1e} relative error"
    return format_figure(entry.mean_kl, "{:.1e}")


def _agreement(entry: FormatResult) -> str:
    if entry.cosine_distance is not None:
        return f"{entry.cosine_distance:.1e} cosine distance"
    return format_figure(None if entry.top1_agreement is None else 100 * entry.top1_agreement, "{:.1f} %")


def state_label(name: str) -> Text:
    """Format the state of an output in its colour."""
    return Text(name.replace("_", " "), style=_STYLES.get(name, ""))


def format_figure(value: float | None, form: str) -> str:
    """Format a figure, or write a dash for a missing one."""
    return figures.MISSING if value is None else form.format(value)


def summary(result: ExportResult) -> RenderableType:
    """Show the formats, their quality, and where they are."""
    parts: list[RenderableType] = []
    if result.formats or result.failed:
        parts += [_formats(result), Text()]
    parts += _base(result)
    if result.multi_token_head is not None:
        heading, _, said = result.multi_token_head.said.partition(": ")
        parts.append(Prose(f"{heading}: ", "dim", said))
    told = result.base_match.reason if result.base_match else ""
    parts += [Prose("warning ", "yellow", warning) for warning in result.warnings if warning != told]
    parts += [
        Prose("recovered ", "yellow", f"{attempt.task}: attempt {attempt.number} by rule {attempt.rule}")
        for attempt in result.attempts
        if attempt.rule and attempt.number > 1  # the first begins with what worked before
    ]
    parts += [
        Prose(*_UNMADE[failed.state == "not_run"], f"{name}: {failed.error_message}")
        for name, failed in result.failed.items()
        if failed.error_message and failed.error_message not in result.error_message
    ]
    if result.error_message:
        parts.append(Prose("error ", "bold red", Text.assemble((f"[{result.reason}] ", "red"), result.error_message)))
    parts += [
        unbroken_line("published ", f"{each.address} ({format_size(each.sent_bytes)} sent)")
        for each in result.published
        if each.address
    ]
    if result.output_directory:
        parts.append(unbroken_line("output  ", result.output_directory))
    if result.validation_report_path:
        parts.append(unbroken_line("report  ", result.validation_report_path))
    return Group(*parts)


def _base(result: ExportResult) -> list[RenderableType]:
    """Show the verdict on the base model, or that the model was exported without an adapter."""
    if result.plain and result.formats:
        return [Prose("plain model ", "dim", "exported as it is: there is no adapter, so checks of one do not apply")]
    if result.base_match is None or not result.formats:
        return []
    base_match = result.base_match
    styles = ("green", "") if base_match.verdict == "green" else ("bold yellow", "yellow")
    return [Prose(f"{base_match.headline.lower()}: ", styles[0], Text(base_match.reason, style=styles[1]))]


def _formats(result: ExportResult) -> FittedTable:
    """Show a row for each requested format, made or not, in the plan's order."""
    reasons = {name: _reason(result, name) for name in _names(result)}
    with_reasons = any(reasons.values())
    table = FittedTable(*_COLUMNS, *([_REASON] if with_reasons else []))
    for name, reason in reasons.items():
        entry = result.formats.get(name)
        cells = _figures(result, entry) if entry else _missing(result.failed[name])
        table.add_row(name, *cells, *([reason] if with_reasons else []))
    return table


def _names(result: ExportResult) -> list[str]:
    known = dict.fromkeys((*result.requested, *result.formats, *result.failed))
    return [name for name in known if name in result.formats or name in result.failed]


def _reason(result: ExportResult, name: str) -> str:
    if name in result.formats:
        return "VALIDATION_FAILED" if result.formats[name].status == "failed" else ""
    return result.failed[name].reason


def _missing(failed: FailedFormat) -> tuple[RenderableType, ...]:
    return (state_label(failed.state), *[MISSING] * (len(_COLUMNS) - 2))


def _figures(result: ExportResult, entry: FormatResult) -> tuple[RenderableType, ...]:
    return (
        state_label(entry.status),
        format_size(entry.size_bytes),
        format_figure(entry.reduction_percent, "{:.0f} %"),
        *figure_cells(entry),
        format_size(result.original_size_bytes) if result.original_size_bytes else MISSING,
    )
