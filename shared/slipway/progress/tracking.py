"""How far an export is, as values for programs and pages: kept up to date from the events of the export."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from slipway.progress.observer import Silent
from slipway.progress.rows import Overall, Row, Rows
from slipway_protos.v1 import export_pb2 as pb


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """One task of an export.

    Attributes:
        task: Id of the task, such as ``quantize-onnx-int8``.
        stage: Stage that it runs; empty while unknown.
        format: Output that it delivers; empty for none.
        state: ``waiting``, ``queued``, ``running``, ``succeeded``, ``failed``, ``cancelled`` or ``skipped``.
        attempt: Number of the newest attempt; 0 before the first.
        phase: What it does now.
        done: Completed part of ``total``, counted in ``unit``.
        total: Amount of this phase; 0 while unknown.
        unit: Unit of both, such as ``bytes``.
        memory_bytes: Memory of the stage's processes now; the peak after the end.
        seconds: Time of the newest attempt so far; None before its start.
        remaining_seconds: Time to the end of the phase; None while unknown.
        reused: Whether its result was there already.
        reason: Reason of a failure; empty otherwise.
    """

    task: str
    stage: str
    format: str
    state: str
    attempt: int
    phase: str
    done: int
    total: int
    unit: str
    memory_bytes: int
    seconds: float | None
    remaining_seconds: float | None
    reused: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ExportProgress:
    """How far an export is.

    Attributes:
        title: What is exported; empty until the sources are known.
        note: Work outside of any task, such as reading the sources; empty for none.
        state: State of the export: ``queued``, ``running``, ``succeeded``, ``failed`` or ``cancelled``; empty before it has one.
        tasks: Its tasks, in the plan's order.
        done: Completed share of all tasks, from 0 to 1. It falls only where tasks are added or run again.
        remaining_seconds: About how long the rest takes; None while unknown.
        run: Name of the run in a list of several; empty for a single export.
        number: Its number in the list, from 1.
        of: Number of runs in the list.
    """

    title: str
    note: str
    state: str
    tasks: tuple[TaskProgress, ...]
    done: float
    remaining_seconds: float | None
    run: str = ""
    number: int = 1
    of: int = 1


@dataclass(frozen=True, slots=True)
class Position:
    """The place of an export among several: the name of its run, its number from 1, and how many there are."""

    run: str = ""
    number: int = 1
    of: int = 1


ALONE = Position()
"""The place of an export that is the only one."""


class Tracked(Silent):
    """An observer that knows how far the export is.

    Args:
        position: The place of the export among several.
        lock: Held while a change is taken; by default a lock of its own.
        resuming: As in :class:`~slipway.progress.rows.Rows`; false where an export is shown, whichever command made its results.
    """

    def __init__(
        self,
        position: Position = ALONE,
        lock: contextlib.AbstractContextManager[object] | None = None,
        *,
        resuming: bool = True,
    ) -> None:
        super().__init__()
        self._rows, self._overall = Rows(resuming=resuming), Overall()
        self._title = self._note = ""
        self._position, self._lock = position, lock or threading.RLock()

    def title(self, text: str) -> None:
        """Take the title."""
        with self._lock:
            self._title = text
            self.changed()

    def note(self, message: str) -> None:
        """Take a line about other work; the same one again is no change."""
        with self._lock:
            if message != self._note:
                self._note = message
                self.changed()

    def expect(self, task_seconds: Mapping[str, float]) -> None:
        """Weight the tasks by their expected time."""
        with self._lock:
            self._overall.task_seconds = task_seconds

    def event(self, event: pb.ExportEvent) -> None:
        """Take an event of the export."""
        super().event(event)
        if event.WhichOneof("event") == "log":
            return
        with self._lock:
            self._rows.take(event)
            self._overall.update(self._rows)
            self.changed()

    def changed(self) -> None:
        """Do nothing: for those who want to know of every change."""

    def progress(self) -> ExportProgress:
        """Return how far the export is now."""
        with self._lock:
            now = time.time()
            return ExportProgress(
                title=self._title,
                note=self._note,
                state=self._rows.state,
                tasks=tuple(_task(row, now) for row in self._rows.tasks.values()),
                done=self._overall.done,
                remaining_seconds=self._overall.remaining_seconds(),
                run=self._position.run,
                number=self._position.number,
                of=self._position.of,
            )


def _task(row: Row, now: float) -> TaskProgress:
    return TaskProgress(
        task=row.task,
        stage=row.stage,
        format=row.format,
        state=row.state,
        attempt=row.attempt,
        phase=row.phase,
        done=row.done,
        total=row.total,
        unit=row.unit,
        memory_bytes=row.memory_bytes,
        seconds=row.elapsed_seconds(now),
        remaining_seconds=row.remaining_seconds(),
        reused=row.reused or row.kept,
        reason=row.reason,
    )
