"""Show the progress of an export, or of one stage, on standard error: a live table on a terminal, plain or JSON lines, or nothing."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from slipway.errors import Failure, ModelExportError
from slipway.observability.logs import command_logs, json_handler, plain_handler, terminal_handler
from slipway.progress.observer import ProgressForm, Silent
from slipway.progress.rendering import JsonLines, PlainLines, progress_table
from slipway.progress.rows import Overall, Rows
from slipway.rpc.messages import log_line, progress_message
from slipway.rpc.values import status_of
from slipway.stage import Progress
from slipway.terminal.console import errors
from slipway_protos.v1 import export_pb2 as pb


class Display(Silent):
    """A context manager that shows an export's events while it is entered; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@contextmanager
def open_display(
    form: ProgressForm, *, level: str, resuming: bool = False, transient: bool = False
) -> Iterator[Display]:
    """Enter the display of a form, and write logs in the same form.

    Args:
        form: ``auto`` is the live table on a terminal, and plain lines elsewhere.
        level: Least severe level that is logged; without progress, only errors are logged.
        resuming: As in :class:`~slipway.progress.rows.Rows`.
        transient: Whether the live table disappears at the end, because the caller shows its contents again; it stays after an error.
    """
    shown: Display
    handler: logging.Handler
    match form:
        case ProgressForm.AUTO if on_terminal():
            shown, handler = LiveDisplay(errors, resuming=resuming, transient=transient), terminal_handler(errors)
        case ProgressForm.JSON:
            shown, handler = LineDisplay(JsonLines(sys.stderr), resuming=resuming), json_handler(sys.stderr)
        case ProgressForm.NONE:
            shown, handler, level = Display(), plain_handler(sys.stderr), "error"
        case _:
            shown, handler = LineDisplay(PlainLines(sys.stderr), resuming=resuming), plain_handler(sys.stderr)
    with command_logs(level, handler), shown:
        yield shown


def on_terminal() -> bool:
    """Return whether standard error is a terminal that can redraw lines; ``FORCE_COLOR`` does not count."""
    return sys.stderr.isatty() and not errors.is_dumb_terminal


class LiveDisplay(Display):
    """Shows one row per task and a bar for the whole, redrawn in place; log lines appear above."""

    def __init__(self, console: Console, *, resuming: bool = False, transient: bool = False) -> None:
        super().__init__()
        self._console = console
        self._rows = Rows(resuming=resuming)
        self._overall = Overall()
        self._note = ""
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=transient)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._note = ""
        self._live.transient = self._live.transient and exc[0] is None
        self._live.refresh()
        self._live.__exit__(None, None, None)

    def title(self, text: str) -> None:
        """Print the title above the table."""
        self._console.print(Text(text, style="bold"))

    def expect(self, task_seconds: Mapping[str, float]) -> None:
        """Weight the tasks by the size of their outputs."""
        self._overall.task_seconds = task_seconds

    def event(self, event: pb.ExportEvent) -> None:
        """Take an event; the table redraws itself."""
        self._rows.take(event)
        self._overall.update(self._rows)
        super().event(event)

    def note(self, message: str) -> None:
        """Show a line below the table."""
        self._note = message

    def _render(self) -> RenderableType:
        return progress_table(self._rows, now=time.time(), note=self._note, overall=self._overall)


class LineDisplay(Display):
    """Writes a line for each change of a task, and now and then a line of progress.

    Args:
        lines: Writer of lines in one form.
        resuming: As in :class:`~slipway.progress.rows.Rows`.
        clock: Function that returns seconds since any fixed time.
    """

    def __init__(
        self, lines: PlainLines | JsonLines, *, resuming: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._lines = lines
        self._rows = Rows(resuming=resuming)
        self._overall = Overall(clock=clock)
        self._pace = Pace(clock)
        self._state = ""

    def title(self, text: str) -> None:
        """Write the title as the first line."""
        self._lines.title(text)

    def expect(self, task_seconds: Mapping[str, float]) -> None:
        """Weight the tasks by the size of their outputs."""
        self._overall.task_seconds = task_seconds

    def event(self, event: pb.ExportEvent) -> None:
        """Write the changes of an event."""
        changed = self._rows.take(event)
        self._overall.update(self._rows)
        if self._rows.state != self._state:
            self._state = self._rows.state
            self._lines.export(self._state)
        for row in changed:
            said = self._lines.task(row)
            if said and row.state == "running":
                self._pace.due((row.task, row.attempt), "", None)
        if event.WhichOneof("event") == "progress":
            row = self._rows.tasks[event.progress.task]
            part = row.done / row.total if row.total else None
            if self._pace.due((row.task, row.attempt), row.phase, part):
                self._lines.progress(row, self._overall)
        super().event(event)

    def note(self, message: str) -> None:
        """Write a line, unless it is empty or one about the same subject was just written."""
        about = message.partition(":")[0]
        if message and self._pace.due(about, about, None):
            self._lines.note(message)


class Pace:
    """Decides when another line of progress is due: rarely, so that the log of a long run stays readable.

    Args:
        clock: Function that returns seconds since any fixed time.
    """

    SECONDS = 10.0
    """Time between two lines about a task that has advanced by a step: to another phase, or by a tenth of this one."""
    STEP = 0.1
    SLOW_SECONDS = 60.0
    """Time between two lines about a task that has not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said: dict[object, tuple[float, str, float | None]] = {}

    def due(self, about: object, phase: str, part: float | None) -> bool:
        """Return whether a line may be written now; True counts as written."""
        now = self._clock()
        if about in self._said:
            then, before, so_far = self._said[about]
            if now - then < self._wait(phase != before, part, so_far):
                return False
        self._said[about] = (now, phase, part)
        return True

    def _wait(self, other_phase: bool, part: float | None, so_far: float | None) -> float:
        further = part is not None and part - (so_far or 0.0) >= self.STEP
        return self.SECONDS if other_phase or further else self.SLOW_SECONDS


class StageReporter:
    """Shows the progress of one stage that runs outside of any export.

    Args:
        name: Name of the stage.
        display: The display, already entered.
    """

    def __init__(self, name: str, display: Display) -> None:
        self._name = name
        self._display = display

    def __enter__(self) -> Self:
        self._export(pb.TASK_STATE_RUNNING)
        return self

    def __exit__(self, kind: object, error: object, *rest: object) -> None:
        if error is None:
            self._export(pb.TASK_STATE_SUCCEEDED)
        elif isinstance(error, Exception):
            self._export(pb.TASK_STATE_FAILED, error.failure() if isinstance(error, ModelExportError) else None)
        else:  # Ctrl-C
            self._export(pb.TASK_STATE_CANCELLED)

    def progress(self, progress: Progress, memory_bytes: int) -> None:
        """Show a stage's progress."""
        report = progress_message(progress, memory_bytes)
        report.task, report.attempt = self._name, 1
        self._display.event(pb.ExportEvent(progress=report))

    def log(self, level: str, message: str) -> None:
        """Show a stage's log line."""
        line = log_line(level, message)
        line.task = self._name
        self._display.event(pb.ExportEvent(log=line))

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
