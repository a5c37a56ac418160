"""Show the progress of one stage that runs outside of any export."""

from __future__ import annotations

from typing import Self

from slipway.cli.progress.display import Display
from slipway.errors import Failure, ModelExportError
from slipway.rpc.stage_messages import log_line, progress_message
from slipway.rpc.statuses import status_of
from slipway.stage import Progress
from slipway_protos.v1 import export_pb2 as pb


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
