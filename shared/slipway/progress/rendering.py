"""Write the progress of an export in each form: the live table, short lines for people, or JSON lines.

JSON lines have the form of the logs. The table has one row per task, with state, bar, amount, speed, memory, remaining and elapsed
time.
"""

from __future__ import annotations

import logging
import time
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from slipway.observability.logs import JsonFormatter, PlainFormatter
from slipway.progress.rows import Overall, Row, Rows
from slipway.sizes import format_size
from slipway.terminal.columns import Column, FittedTable
from slipway.terminal.console import duration

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


class PlainLines:
    """Writes lines such as ``03:14:07 merge: done in 1.2 s``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._formatter = PlainFormatter()

    def title(self, text: str) -> None:
        """Write the title."""
        self._write(text)

    def export(self, state: str) -> None:
        """Write nothing: the lines of tasks and the result say enough."""

    def task(self, row: Row) -> bool:
        """Write that a task started or ended, but not that it waits; return True, because its next line of progress can wait."""
        text = _state_text(row)
        if text:
            self._write(f"{row.task}: {text}")
        return True

    def progress(self, row: Row, overall: Overall) -> None:
        """Write phase, amount, speed and remaining time."""
        left = row.remaining_seconds()
        figures = [amount(row), speed(row), f"{duration(left)} left" if left is not None and row.total else ""]
        share = f" {row.done / row.total:.0%}" if row.total else ""
        shown = ", ".join(figure for figure in figures if figure)
        total = f", {overall.done:.0%} of all" if overall.tasks > 1 else ""
        self._write(f"{row.task}: {row.phase}{share}" + (f" ({shown})" if shown else "") + total)

    def note(self, message: str) -> None:
        """Write the message."""
        self._write(message)

    def _write(self, text: str) -> None:
        self._stream.write(self._formatter.format(_record(text)) + "\n")
        self._stream.flush()


class JsonLines:
    """Writes objects of :class:`~slipway.observability.logs.JsonFormatter` with an ``event`` and its facts."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._formatter = JsonFormatter()

    def title(self, text: str) -> None:
        """Write the title as a note."""
        self.note(text)

    def export(self, state: str) -> None:
        """Write the state."""
        self._write("export", f"the export is {state}", state=state)

    def task(self, row: Row) -> bool:
        """Write the state, and the facts of an ended attempt; return False, because progress may follow at once."""
        self._write("task", f"{row.task}: {_state_text(row) or row.state}", **_task_facts(row))
        return False

    def progress(self, row: Row, overall: Overall) -> None:
        """Write all figures."""
        remaining, left = row.remaining_seconds(), overall.remaining_seconds()
        self._write(
            "progress",
            f"{row.task}: {row.phase}",
            task=row.task,
            attempt=row.attempt,
            phase=row.phase,
            done=row.done,
            total=row.total,
            unit=row.unit,
            per_second=round(row.rate, 1) if row.rate else None,
            memory_bytes=row.memory_bytes,
            remaining_seconds=None if remaining is None else round(remaining, 1),
            export_done=round(overall.done, 3),
            export_remaining_seconds=None if left is None else round(left, 1),
        )

    def note(self, message: str) -> None:
        """Write the message."""
        self._write("note", message)

    def _write(self, event: str, message: str, **facts: Any) -> None:
        self._stream.write(self._formatter.format(_record(message, event=event, **facts)) + "\n")
        self._stream.flush()


def _record(message: str, **facts: Any) -> logging.LogRecord:
    made = logging.LogRecord("slipway.progress", logging.INFO, "", 0, message, None, None)
    made.__dict__.update(facts)
    return made


def _state_text(row: Row) -> str:
    """Describe a task's state for people; empty if no line is needed."""
    seconds = row.elapsed_seconds(time.time())
    took = f" in {duration(seconds)}" if seconds is not None and row.ended is not None else ""
    if row.state == "succeeded" and (row.reused or row.kept):
        return "reused"
    if row.state == "queued" and row.attempt < 2:
        return ""
    told = {
        "queued": "retrying",
        "running": "started",
        "succeeded": f"done{took}",
        "failed": f"failed{took}: {row.reason}" if row.reason else f"failed{took}",
        "cancelled": "cancelled",
        "skipped": "skipped",
    }.get(row.state, "")
    return f"{told} (attempt {row.attempt})" if told and row.attempt > 1 else told


def _task_facts(row: Row) -> dict[str, object]:
    facts: dict[str, object] = {"task": row.task, "state": row.state, "attempt": row.attempt}
    elapsed = row.elapsed_seconds(time.time())
    if row.ended is not None and elapsed is not None:
        facts["seconds"] = round(elapsed, 3)
        facts["peak_memory_bytes"] = row.memory_bytes
    if row.reused or row.kept:
        facts["reused"] = True
    if row.reason:
        facts["reason"] = row.reason
    return facts
