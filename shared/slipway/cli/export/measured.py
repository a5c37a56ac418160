"""Columns for the measurements of an output, shared by all tables that show them."""

from __future__ import annotations

from rich.text import Text

from slipway.cli.terminal.columns import Column
from slipway.results.report import figures
from slipway.results.result import FormatResult
from slipway.sizes import format_size

COLUMNS = (
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


def cells(entry: FormatResult) -> tuple[str, ...]:
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
    return shown(entry.mean_kl, "{:.1e}")


def _agreement(entry: FormatResult) -> str:
    if entry.cosine_distance is not None:
        return f"{entry.cosine_distance:.1e} cosine distance"
    return shown(None if entry.top1_agreement is None else 100 * entry.top1_agreement, "{:.1f} %")


def state(name: str) -> Text:
    """Format the state of an output in its colour."""
    return Text(name.replace("_", " "), style=_STYLES.get(name, ""))


def shown(value: float | None, form: str) -> str:
    """Format a figure, or write a dash for a missing one."""
    return figures.MISSING if value is None else form.format(value)
