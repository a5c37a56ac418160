"""The result as a table, with warnings, recoveries and the error below it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipway.cli.console import size
from slipway.report import figures
from slipway.result import ExportResult, FormatResult

_STATUS = {"passed": "green", "failed": "red", "not_run": "yellow", "not_validated": "dim"}


def summary(result: ExportResult) -> RenderableType:
    """What was made, how good it is, and where it is."""
    parts: list[RenderableType] = []
    if result.formats:
        parts += [_formats(result), Text()]
    parts += [Text.assemble(("warning ", "yellow"), warning) for warning in result.warnings]
    parts += [
        Text.assemble(("recovered ", "yellow"), f"{attempt.task}: attempt {attempt.number} by rule {attempt.rule}")
        for attempt in result.attempts
        if attempt.rule
    ]
    if result.error_message:
        parts.append(Text.assemble(("error ", "bold red"), (f"[{result.reason}] ", "red"), result.error_message))
    if result.output_directory:
        parts.append(Text.assemble(("output  ", "bold"), result.output_directory))
    if result.validation_report_path:
        parts.append(Text.assemble(("report  ", "bold"), result.validation_report_path))
    return Group(*parts)


def _formats(result: ExportResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("format", no_wrap=True)
    for name in ("merged", "size", "smaller by", "KL", "top-1", "prefill", "decode", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("validation", no_wrap=True)
    table.add_column("path", overflow="fold")
    for name, entry in result.formats.items():
        table.add_row(Text(name, style="bold"), *_figures(result, entry), _relative(result, name))
    return table


def _figures(result: ExportResult, entry: FormatResult) -> tuple[RenderableType, ...]:
    return (
        size(result.original_size_bytes) if result.original_size_bytes else "–",
        size(entry.size_bytes),
        _number(entry.reduction_percent, "{:.0f} %"),
        _number(entry.mean_kl, "{:.1e}"),
        _number(None if entry.top1_agreement is None else 100 * entry.top1_agreement, "{:.1f} %"),
        figures.prompt_speed(entry),
        figures.generation_speed(entry),
        _number(entry.memory_usage_mb, "{:.0f} MB"),
        Text(entry.status.replace("_", " "), style=_STATUS.get(entry.status, "")),
    )


def _relative(result: ExportResult, name: str) -> Text:
    path = result.paths.get(name, "")
    return Text(path.removeprefix(result.output_directory).lstrip("/") + "/" if path else "")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
