"""Show several exports on one display, which draws a row for each task of an export: here a row is a whole export."""

from __future__ import annotations

import threading

from slipway.progress.observer import Observer
from slipway.progress.rows import ENDED
from slipway.progress.tracking import Tracked
from slipway.texts import counted
from slipway_protos.v1 import export_pb2 as pb

_STATES = {
    "queued": pb.TASK_STATE_QUEUED,
    "running": pb.TASK_STATE_RUNNING,
    "succeeded": pb.TASK_STATE_SUCCEEDED,
    "failed": pb.TASK_STATE_FAILED,
    "cancelled": pb.TASK_STATE_CANCELLED,
}
_WHOLE = 100
"""Per cent: the steps of a row's bar."""


class Overview:
    """Passes the state of each export on to one observer as that of a task, one call at a time.

    Args:
        observer: The observer.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.RLock()
        self._names: dict[str, int] = {}

    def open(self, name: str, number: int, of: int) -> Observer:
        """Return the observer of one export.

        Args:
            name: Name of the export; the number is added if another one has it.
            number: Its number, from 1.
            of: Number of all exports.
        """
        with self._lock:
            if not self._names:
                self._observer.title(counted(of, "export"))
            label = name if self._names.setdefault(name, number) == number else f"{name} ({number})"
        return _RowOf(label, self._observer, self._lock)


class _RowOf(Tracked):
    """Keeps the tasks of one export, and tells its share and its state as those of a task."""

    def __init__(self, name: str, observer: Observer, lock: threading.RLock) -> None:
        super().__init__(lock=lock)
        self._name, self._observer = name, observer
        self._attempt = pb.Attempt(number=1)
        self._state = self._phase = ""

    def note(self, message: str) -> None:
        """Show work outside of any task as the phase of the row."""
        with self._lock:
            if message and message.partition(":")[0] != self._phase.partition(":")[0]:
                self._tell_state("running")
                self._tell_share(message)

    def changed(self) -> None:
        """Tell the state, and the share of the work that is done."""
        self._tell_state(self._rows.state)
        running = [row for row in self._rows.tasks.values() if row.state == "running"]
        if running and self._rows.state not in ENDED:
            self._tell_share(running[0].task)

    def log(self, level: int, message: str) -> None:
        """Pass a line to the log, with the name of the export."""
        self._observer.log(level, message if message.startswith(self._name) else f"{self._name}: {message}")

    def _tell_state(self, state: str) -> None:
        later = ("running", *ENDED) if state == "queued" else ENDED if state == "running" else ()
        if (
            state == self._state or state not in _STATES or self._state in later
        ):  # reading the sources counts as running
            return
        self._state = state
        if state == "running" and not self._attempt.HasField("start_time"):
            self._attempt.start_time.GetCurrentTime()
        if state in ENDED:
            self._attempt.end_time.GetCurrentTime()
        self._attempt.state = _STATES[state]
        task = pb.Task(id=self._name, state=_STATES[state], attempts=[self._attempt])
        self._observer.event(pb.ExportEvent(export=pb.Export(state=pb.EXPORT_STATE_RUNNING, tasks=[task])))

    def _tell_share(self, phase: str) -> None:
        self._phase = phase
        done = round(_WHOLE * self._overall.done)
        share = pb.TaskProgress(
            task=self._name, attempt=1, phase=phase, done=done, total=_WHOLE if done else 0, unit="%"
        )
        self._observer.event(pb.ExportEvent(progress=share))
