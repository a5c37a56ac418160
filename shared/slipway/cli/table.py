"""The live table: one row per task with state, bar, amount, speed, memory, time left and time taken."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipway.cli.console import duration, size
from slipway.cli.rows import Row, Rows

_STYLES = {
    "waiting": ("·", "dim"),
    "queued": ("○", "dim"),
    "running": ("●", "cyan"),
    "succeeded": ("✔", "green"),
    "failed": ("✘", "red"),
    "cancelled": ("■", "yellow"),
    "skipped": ("–", "dim"),
}


def progress_table(rows: Rows, *, now: float, note: str = "") -> RenderableType:
    """All tasks as a table, and a line below it.

    Args:
        rows: What is known.
        now: Seconds since the epoch.
        note: The line below.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("", width=16)
    for name in ("done", "speed", "memory", "left", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows.tasks.values():
        table.add_row(*_cells(row, now))
    footer = [Text(note, style="dim")] if note else []
    return Group(*([table] if rows.tasks else []), *footer)


def _cells(row: Row, now: float) -> tuple[RenderableType, ...]:
    mark, style = _STYLES.get(row.state, ("?", ""))
    elapsed, remaining = row.elapsed_seconds(now), row.remaining_seconds()
    return (
        Text(f"{mark} {row.task}", style=style),
        Text(_state(row), style=style),
        _bar(row),
        _amount(row) if row.state == "running" else "",
        _speed(row) if row.state == "running" else "",
        size(row.memory_bytes) if row.memory_bytes else "",
        duration(remaining) if remaining is not None else "",
        duration(elapsed) if elapsed is not None else "",
    )


def _state(row: Row) -> str:
    words = row.phase if row.state == "running" and row.phase else row.state
    if row.state == "succeeded" and (row.reused or row.kept):
        words = "reused"
    if row.state == "failed" and row.reason:
        words = row.reason
    return f"{words} (attempt {row.attempt})" if row.attempt > 1 else words


def _bar(row: Row) -> RenderableType:
    if row.state == "succeeded":
        return ProgressBar(total=1, completed=1, width=16)
    if row.state != "running":
        return ""
    if not row.total:
        return ProgressBar(total=None, pulse=True, width=16)
    return ProgressBar(total=row.total, completed=min(row.done, row.total), width=16)


def _amount(row: Row) -> str:
    if not row.done and not row.total:
        return ""
    if row.unit == "bytes":
        return f"{size(row.done)}/{size(row.total)}" if row.total else size(row.done)
    return f"{row.done}/{row.total} {row.unit}" if row.total else f"{row.done} {row.unit}"


def _speed(row: Row) -> str:
    if not row.rate:
        return ""
    return f"{size(row.rate)}/s" if row.unit == "bytes" else f"{row.rate:.1f}/s"
