"""What the work of an export tells while it runs, to whom it may concern: a display, a program's function, or nobody."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slipway_protos.v1 import export_pb2 as pb

_EXPORT_LOG, _TASK_LOG = logging.getLogger("slipway.export"), logging.getLogger("slipway.task")


class ProgressForm(StrEnum):
    """A form of progress."""

    AUTO = "auto"
    PLAIN = "plain"
    JSON = "json"
    NONE = "none"


class Observer(Protocol):
    """Receives the progress of an export: notes also from threads that read files, the rest from the thread that does its work.

    An error that it raises ends the export.
    """

    def title(self, text: str) -> None:
        """Take the title of the work, once the sources are known."""

    def note(self, message: str) -> None:
        """Take a line about work outside of any task, such as reading the sources; empty when that work is over."""

    def expect(self, task_seconds: Mapping[str, float]) -> None:
        """Take the expected time of each task, in seconds."""

    def event(self, event: pb.ExportEvent) -> None:
        """Take one event of the coordinator."""

    def log(self, level: int, message: str) -> None:
        """Take a line for the log, at a level of :mod:`logging`."""


class Silent:
    """Shows nothing; lines for the log go to the loggers ``slipway.export`` and ``slipway.task``."""

    def __init__(self) -> None:
        self._task_log = TaskLog()

    def title(self, text: str) -> None:
        """Take the title."""

    def note(self, message: str) -> None:
        """Take a line about work outside of any task."""

    def expect(self, task_seconds: Mapping[str, float]) -> None:
        """Take the expected time of each task."""

    def event(self, event: pb.ExportEvent) -> None:
        """Take an event; only its log line is passed on."""
        self._task_log.take(event)

    def log(self, level: int, message: str) -> None:
        """Pass a line to the log."""
        _EXPORT_LOG.log(level, message)


class TaskLog:
    """Passes the log lines of tasks to the log; a repeated warning of another attempt or task is dropped."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def take(self, event: pb.ExportEvent) -> None:
        """Log the line of an event, if it has one."""
        if event.WhichOneof("event") != "log":
            return
        line = event.log
        level = logging.getLevelNamesMapping().get(line.level.upper(), logging.INFO)
        if level >= logging.WARNING:
            if line.message in self._said:
                return
            self._said.add(line.message)
        _TASK_LOG.log(level, "%s: %s", line.task, line.message, extra={"task": line.task})
