"""Write lines of progress: short ones for people, or JSON objects in the form of the logs."""

from __future__ import annotations

import logging
import time
from typing import Any, TextIO

from slipway.cli.progress.rows import Overall, Row
from slipway.cli.progress.table import amount, speed
from slipway.cli.terminal.console import duration
from slipway.observability.logs import JsonFormatter, PlainFormatter


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
