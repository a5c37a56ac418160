"""What ``slipway stage`` shows of a stage's result: its folders, and the figures of a validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipway.cli.console import size
from slipway.validation import FILE_NAME, OutputValidation, ValidationReport

_STYLES = {"passed": "green", "failed": "red", "not_run": "yellow"}


def read_validation(done: dict[str, Any]) -> ValidationReport | None:
    """The report among a stage's outputs; None where the stage does not validate."""
    folder = done["outputs"].get("validation")
    file = Path(folder) / FILE_NAME if folder else None
    return ValidationReport.model_validate_json(file.read_bytes()) if file is not None and file.is_file() else None


def figures(report: ValidationReport) -> RenderableType:
    """What was measured of each output, one row each, and below it why one failed or was not run."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("output", no_wrap=True)
    table.add_column("validation", no_wrap=True)
    for name in ("KL", "top-1", "perplexity", "prefill", "decode", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for output in report.outputs:
        status = Text(output.status.value.replace("_", " "), style=_STYLES.get(output.status.value, ""))
        table.add_row(Text(output.name, style="bold"), status, *_row(output))
    reasons = [
        Text(f"{output.name}: {said}")
        for output in report.outputs
        if (said := output.explanation or output.status_reason)
    ]
    warnings = [Text.assemble(("warning ", "yellow"), warning) for warning in report.warnings]
    return Group(table, *reasons, *warnings)


def _row(output: OutputValidation) -> tuple[str, ...]:
    distance, speed, memory = output.to_reference, output.speed, output.memory
    agreement = distance.top1_agreement if distance else None
    return (
        _shown(distance.mean_kl if distance else None, "{:.1e}"),
        _shown(None if agreement is None else 100 * agreement, "{:.1f} %"),
        _shown(output.perplexity, "{:.2f}"),
        _shown(speed.prefill_ms if speed else None, "{:.1f} ms"),
        _shown(speed.decode_tokens_per_second if speed else None, "{:.0f} tok/s"),
        size(memory.peak_rss_bytes) if memory else "–",
    )


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
