"""Progress: a live table on a terminal, JSON lines elsewhere. Both write to standard error only."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import IO, Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live

from slipway.cli.console import errors
from slipway.cli.rows import Row, Rows
from slipway.cli.table import progress_table
from slipway.errors import Failure, ModelExportError
from slipway.stage import Progress
from slipway.wire import status_of
from slipway_protos.v1 import export_pb2 as pb

_LINE_SECONDS = 1.0
"""At most one progress line per task and second."""

_UNCHANGED_SECONDS = 10.0
"""A task whose progress does not change says so this often."""

_log = logging.getLogger("slipway.task")


class Display(Protocol):
    """Something that shows an export's events while it is entered."""

    def __enter__(self) -> Self:
        """Start to show."""
        ...

    def __exit__(self, *exc: object) -> None:
        """Stop to show."""
        ...

    def event(self, event: pb.ExportEvent) -> None:
        """Show one event."""
        ...

    def note(self, message: str) -> None:
        """Say what is going on outside of any task, such as reading the sources."""
        ...


def make_display(*, resuming: bool = False) -> Display:
    """The display that suits where standard error goes; ``resuming`` as in :class:`Rows`."""
    return LiveDisplay(errors, resuming=resuming) if errors.is_terminal else LineDisplay(sys.stderr, resuming=resuming)


class LiveDisplay:
    """One row per task, redrawn in place; log lines appear above."""

    def __init__(self, console: Console, *, resuming: bool = False) -> None:
        self._rows = Rows(resuming=resuming)
        self._note = ""
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._note = ""
        self._live.refresh()
        self._live.__exit__(None, None, None)

    def event(self, event: pb.ExportEvent) -> None:
        """Take an event; the table is redrawn by itself."""
        self._rows.take(event)
        _pass_on(event)

    def note(self, message: str) -> None:
        """Show a line below the table."""
        self._note = message

    def _render(self) -> RenderableType:
        return progress_table(self._rows, now=time.time(), note=self._note)


class LineDisplay:
    """One JSON object per change of a task, and for progress at most one per task and second."""

    def __init__(self, stream: IO[str], *, resuming: bool = False) -> None:
        self._stream = stream
        self._rows = Rows(resuming=resuming)
        self._said: dict[str, tuple[float, object]] = {}
        self._state = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def event(self, event: pb.ExportEvent) -> None:
        """Write what an event changes."""
        changed = self._rows.take(event)
        if self._rows.state != self._state:
            self._state = self._rows.state
            self._write({"event": "export", "state": self._state})
        for row in changed:
            self._write({"event": "task", **_facts(row)})
        if event.WhichOneof("event") == "progress":
            self._progress(self._rows.tasks[event.progress.task])
        _pass_on(event)

    def note(self, message: str) -> None:
        """Write a line, unless one was written just now or there is nothing to say."""
        if message and self._due("", message.partition(":")[0]):
            self._write({"event": "note", "message": message})

    def _progress(self, row: Row) -> None:
        if self._due(row.task, (row.attempt, row.phase, row.done, row.total)):
            self._write({"event": "progress", **_progress_facts(row)})

    def _due(self, about: str, what: object) -> bool:
        """Whether something new, or something not said for long, may be said about a task now."""
        now = time.monotonic()
        said, before = self._said.get(about, (-_UNCHANGED_SECONDS, None))
        if now - said < (_LINE_SECONDS if what != before else _UNCHANGED_SECONDS):
            return False
        self._said[about] = (now, what)
        return True

    def _write(self, document: dict[str, object]) -> None:
        self._stream.write(json.dumps({"time": round(time.time(), 3), **document}) + "\n")
        self._stream.flush()


class StageReporter:
    """Progress of one stage that runs outside of any export."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._display = make_display()

    def __enter__(self) -> Self:
        self._display.__enter__()
        self._export(pb.TASK_STATE_RUNNING)
        return self

    def __exit__(self, kind: object, error: object, *rest: object) -> None:
        failure = error.failure() if isinstance(error, ModelExportError) else None
        self._export(pb.TASK_STATE_FAILED if kind else pb.TASK_STATE_SUCCEEDED, failure)
        self._display.__exit__(kind, error, *rest)

    def progress(self, progress: Progress, memory_bytes: int) -> None:
        """Show a stage's progress."""
        report = pb.TaskProgress(
            task=self._name,
            attempt=1,
            phase=progress.phase,
            done=progress.done,
            total=progress.total,
            unit=progress.unit,
            memory_bytes=memory_bytes,
        )
        self._display.event(pb.ExportEvent(progress=report))

    def log(self, level: str, message: str) -> None:
        """Pass a stage's log line on."""
        self._display.event(pb.ExportEvent(log=pb.LogLine(task=self._name, level=level, message=message)))

    def _export(self, state: pb.TaskState, failure: Failure | None = None) -> None:
        attempt = pb.Attempt(number=1, state=state, error=None if failure is None else status_of(failure))
        attempt.start_time.GetCurrentTime()
        if state != pb.TASK_STATE_RUNNING:
            attempt.end_time.GetCurrentTime()
        else:
            self._started = attempt.start_time
        attempt.start_time.CopyFrom(self._started)
        task = pb.Task(id=self._name, stage=self._name, state=state, attempts=[attempt])
        self._display.event(pb.ExportEvent(export=pb.Export(state=pb.EXPORT_STATE_RUNNING, tasks=[task])))


def _pass_on(event: pb.ExportEvent) -> None:
    """Hand a task's log line to the log."""
    if event.WhichOneof("event") == "log":
        level = logging.getLevelNamesMapping().get(event.log.level.upper(), logging.INFO)
        _log.log(level, "%s: %s", event.log.task, event.log.message, extra={"task": event.log.task})


def _facts(row: Row) -> dict[str, object]:
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


def _progress_facts(row: Row) -> dict[str, object]:
    remaining = row.remaining_seconds()
    return {
        "task": row.task,
        "attempt": row.attempt,
        "phase": row.phase,
        "done": row.done,
        "total": row.total,
        "unit": row.unit,
        "per_second": round(row.rate, 1) if row.rate else None,
        "memory_bytes": row.memory_bytes,
        "remaining_seconds": None if remaining is None else round(remaining, 1),
    }
