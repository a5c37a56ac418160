"""Progress for programs: values that a function of the program gets after every change, or bars on request."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from slipway.exporting.interruption import Interruption
from slipway.progress.observer import Observer, Silent
from slipway.progress.overview import Overview
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


OnProgress = Callable[[ExportProgress], object]


Opened = Callable[[Position], contextlib.AbstractContextManager[Observer]]


@contextlib.contextmanager
def observing_several(
    progress: bool | OnProgress, interruption: Interruption, relay: Callable[[Observer], Observer] = lambda each: each
) -> Iterator[Opened]:
    """Yield a function that opens the observer of one of several exports: as :func:`observing`, with a bar for each export.

    Args:
        progress: What was asked for.
        interruption: Gets an error of the function, which ends all exports.
        relay: Function that puts an observer between an export and what looks on.
    """
    lock = threading.RLock()
    with contextlib.ExitStack() as stack:
        if progress is True:
            from slipway.progress.notebook import display_here

            open_row = Overview(relay(stack.enter_context(display_here()))).open
            yield lambda position: contextlib.nullcontext(open_row(position.run, position.number, position.of))
        elif callable(progress):
            yield lambda position: contextlib.nullcontext(relay(_Calling(progress, interruption, position, lock)))
        else:
            yield lambda _: contextlib.nullcontext(Silent())


@contextlib.contextmanager
def observing(progress: bool | OnProgress, interruption: Interruption) -> Iterator[Observer]:
    """Yield an observer: nobody (False), bars (True), or one that calls a function after every change.

    Args:
        progress: What was asked for.
        interruption: Gets an error of the function, which ends the export.
    """
    if progress is True:
        from slipway.progress.notebook import display_here

        with display_here() as display:
            yield display
    else:
        yield _Calling(progress, interruption) if callable(progress) else Silent()


class _Calling(Silent):
    """Calls a function with the progress after every change, never twice at a time."""

    def __init__(
        self,
        on_progress: OnProgress,
        interruption: Interruption,
        position: Position = Position(),
        lock: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__()
        self._on_progress, self._interruption = on_progress, interruption
        self._rows, self._overall = Rows(resuming=True), Overall()
        self._title = self._note = ""
        self._position, self._lock = position, lock or threading.RLock()

    def title(self, text: str) -> None:
        """Take the title."""
        with self._lock:
            self._title = text
            self._call()

    def note(self, message: str) -> None:
        """Take a line about other work; the same one again is no change."""
        with self._lock:
            if message != self._note:
                self._note = message
                self._call()

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
            self._call()

    def _call(self) -> None:
        now = time.time()
        progress = ExportProgress(
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
        try:
            self._on_progress(progress)
        except StopIteration as error:  # it would end a generator or a coroutine on its way
            stopped = RuntimeError("progress raised StopIteration")
            self._interruption.request(stopped)
            raise stopped from error
        except Exception as error:
            self._interruption.request(error)
            raise


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
