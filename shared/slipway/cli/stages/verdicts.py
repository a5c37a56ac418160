"""Show the figures of a validation that ``slipway stage`` ran. A module of its own, because no other stage needs what reports are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from slipway.cli.export import summary
from slipway.results.outcome import format_result
from slipway.terminal.columns import Column, FittedTable, Prose
from slipway.validation.findings import FILE_NAME, ValidationReport

_COLUMNS = (
    Column("output", style="bold"),
    Column("validation"),
    Column("perplexity", rank=5, right=True),
    *summary.FIGURE_COLUMNS,
)


def read_validation(done: dict[str, Any]) -> ValidationReport | None:
    """Read the validation report among a stage's outputs; None if the stage does not validate."""
    folder = done["outputs"].get("validation")
    file = Path(folder) / FILE_NAME if folder else None
    return ValidationReport.read(file.parent) if file is not None and file.is_file() else None


def figures(report: ValidationReport) -> RenderableType:
    """Show the measurements of each output as a row, and below them why outputs failed or were not run."""
    table = FittedTable(*_COLUMNS)
    for output in report.outputs:
        entry = format_result(size_bytes=output.size_bytes, found=output)
        perplexity = summary.format_figure(output.perplexity, "{:.2f}")
        table.add_row(output.name, summary.state_label(entry.status), perplexity, *summary.figure_cells(entry))
    reasons = [
        Prose(f"{output.name}: ", "bold", said)
        for output in report.outputs
        if (said := output.explanation or output.status_reason)
    ]
    warnings = [Prose("warning ", "yellow", warning) for warning in report.warnings]
    return Group(table, *reasons, *warnings)
