"""What ``slipway stage`` shows of a stage's result: its folders, and the figures of a validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from slipway.cli.columns import Column, FittedTable, Prose
from slipway.cli.console import size
from slipway.report import figures as shown
from slipway.validation import FILE_NAME, OutputValidation, Speed, ValidationReport

_STYLES = {"passed": "green", "failed": "red", "not_run": "yellow"}

_COLUMNS = (
    Column("output", style="bold"),
    Column("validation"),
    Column("KL", rank=1, right=True),
    Column("top-1", rank=2, right=True),
    Column("perplexity", rank=3, right=True),
    Column("prefill", rank=5, right=True),
    Column("decode", rank=4, right=True),
    Column("memory", rank=6, right=True),
)


def read_validation(done: dict[str, Any]) -> ValidationReport | None:
    """The report among a stage's outputs; None where the stage does not validate."""
    folder = done["outputs"].get("validation")
    file = Path(folder) / FILE_NAME if folder else None
    return ValidationReport.read(file.parent) if file is not None and file.is_file() else None


def figures(report: ValidationReport) -> RenderableType:
    """What was measured of each output, one row each, and below it why one failed or was not run."""
    table = FittedTable(*_COLUMNS)
    for output in report.outputs:
        status = Text(output.status.value.replace("_", " "), style=_STYLES.get(output.status.value, ""))
        table.add_row(output.name, status, *_row(output))
    reasons = [
        Prose(f"{output.name}: ", "bold", said)
        for output in report.outputs
        if (said := output.explanation or output.status_reason)
    ]
    warnings = [Prose("warning ", "yellow", warning) for warning in report.warnings]
    return Group(table, *reasons, *warnings)


def _row(output: OutputValidation) -> tuple[str, ...]:
    distance, memory = output.to_reference, output.memory
    agreement = distance.top1_agreement if distance else None
    return (
        _shown(distance.mean_kl if distance else None, "{:.1e}"),
        _shown(None if agreement is None else 100 * agreement, "{:.1f} %"),
        _shown(output.perplexity, "{:.2f}"),
        *_speeds(output.speed),
        size(memory.peak_rss_bytes) if memory else "–",
    )


def _speeds(speed: Speed | None) -> tuple[str, str]:
    """Prompt and generation, with their scatter."""
    if speed is None:
        return "–", "–"
    return (
        shown.scattered(
            shown.milliseconds(speed.prefill_ms), _percent(speed.prefill_spread), stable=speed.prefill_stable
        ),
        shown.scattered(
            shown.rate(speed.decode_tokens_per_second), _percent(speed.decode_spread), stable=speed.decode_stable
        ),
    )


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
