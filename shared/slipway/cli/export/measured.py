"""What was measured of an output, as columns of every table that shows it."""

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
    """One cell for each of the columns."""
    memory = entry.memory_usage_mb
    return (
        _distance(entry),
        _agreement(entry),
        figures.prompt_speed(entry),
        figures.generation_speed(entry),
        figures.MISSING if memory is None else format_size(1e6 * memory),
    )


def _distance(entry: FormatResult) -> str:
    """KL; where results are values and have none, what was measured instead, by name."""
    if entry.relative_error is not None:
        return f"{entry.relative_error:.1e} relative error"
    return shown(entry.mean_kl, "{:.1e}")


def _agreement(entry: FormatResult) -> str:
    if entry.cosine_distance is not None:
        return f"{entry.cosine_distance:.1e} cosine distance"
    return shown(None if entry.top1_agreement is None else 100 * entry.top1_agreement, "{:.1f} %")


def state(name: str) -> Text:
    """How an output was found to be, or why there is none, in its colour."""
    return Text(name.replace("_", " "), style=_STYLES.get(name, ""))


def shown(value: float | None, form: str) -> str:
    """A figure in a form of its own, or a dash."""
    return figures.MISSING if value is None else form.format(value)
