"""Draw the live table: one row per task with state, bar, amount, speed, memory, remaining and elapsed time."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from slipway.cli.progress.rows import Overall, Row, Rows
from slipway.cli.terminal.columns import Column, FittedTable
from slipway.cli.terminal.console import duration
from slipway.sizes import format_size

_BAR = 16
_STYLES = {
    "waiting": ("·", "dim"),
    "queued": ("○", "dim"),
    "running": ("●", "cyan"),
    "succeeded": ("✔", "green"),
    "failed": ("✘", "red"),
    "cancelled": ("■", "yellow"),
    "skipped": ("–", "dim"),
}
_COLUMNS = (
    Column("stage"),
    Column("state", wrap=True),
    Column("", rank=3, width=_BAR),
    Column("done", rank=4, right=True),
    Column("speed", rank=5, right=True),
    Column("memory", rank=6, right=True),
    Column("left", rank=2, right=True),
    Column("time", rank=1, right=True),
)


def progress_table(rows: Rows, *, now: float, note: str = "", overall: Overall | None = None) -> RenderableType:
    """Draw all tasks as a table, the whole export, and a line below it.

    Args:
        rows: State of the tasks.
        now: Present time in seconds since the epoch.
        note: The line below.
        overall: State of the whole export; None leaves it out.
    """
    table = FittedTable(*_COLUMNS, header="dim", hint="")
    for row in rows.tasks.values():
        table.add_row(*_cells(row, now))
    parts: list[RenderableType] = [table] if rows.tasks else []
    if overall is not None and len(rows.tasks) > 1:
        parts.append(_total(overall))
    return Group(*parts, *([Text(note, style="dim")] if note else []))


def _total(overall: Overall) -> FittedTable:
    left = overall.remaining_seconds()
    line = FittedTable(
        Column(""), Column("", rank=1, width=2 * _BAR), Column(""), Column("", rank=2), header="", hint=""
    )
    line.add_row(
        Text("total", style="bold"),
        ProgressBar(total=1.0, completed=overall.done, width=2 * _BAR),
        f"{overall.done:.0%}",
        "" if left is None else f"about {about(left)} left",
    )
    return line


def about(seconds: float) -> str:
    """Format an estimated time without false precision: ``40 s``, ``3 min``, ``2 h 10 min``."""
    if seconds < 90:
        return f"{max(round(seconds / 5) * 5, 5)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60 // 10 * 10} min"


def _cells(row: Row, now: float) -> tuple[RenderableType, ...]:
    mark, style = _STYLES.get(row.state, ("?", ""))
    elapsed, remaining = row.elapsed_seconds(now), row.remaining_seconds()
    return (
        Text(f"{mark} {row.task}", style=style),
        Text(state_of(row), style=style),
        _bar(row),
        amount(row) if row.state == "running" else "",
        speed(row) if row.state == "running" else "",
        format_size(row.memory_bytes) if row.memory_bytes else "",
        duration(remaining) if remaining is not None else "",
        duration(elapsed) if elapsed is not None else "",
    )


def state_of(row: Row) -> str:
    """Describe the state of a task in words, with its phase, reason and attempt."""
    words = row.phase if row.state == "running" and row.phase else row.state
    if row.state == "succeeded" and (row.reused or row.kept):
        words = "reused"
    if row.state == "failed" and row.reason:
        words = row.reason
    return f"{words} (attempt {row.attempt})" if row.attempt > 1 else words


def _bar(row: Row) -> RenderableType:
    if row.state == "succeeded":
        return ProgressBar(total=1, completed=1, width=_BAR)
    if row.state != "running":
        return ""
    if not row.total:
        return ProgressBar(total=None, pulse=True, width=_BAR)
    return ProgressBar(total=row.total, completed=min(row.done, row.total), width=_BAR)


def amount(row: Row) -> str:
    """Format the completed and the total amount."""
    if not row.done and not row.total:
        return ""
    if row.unit == "bytes":
        return f"{format_size(row.done)}/{format_size(row.total)}" if row.total else format_size(row.done)
    return f"{row.done}/{row.total} {row.unit}" if row.total else f"{row.done} {row.unit}"


def speed(row: Row) -> str:
    """Format the speed; empty while unknown."""
    if not row.rate:
        return ""
    return f"{format_size(row.rate)}/s" if row.unit == "bytes" else f"{row.rate:.1f}/s"
