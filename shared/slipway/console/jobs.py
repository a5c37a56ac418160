"""Exports that this process runs, one after another, each in a thread of its own."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from slipway.configuration import LoadedConfiguration
from slipway.console.place import STATES_AT_END
from slipway.errors import Failure, ModelExportError, ServiceError
from slipway.exporting.interruption import Interruption
from slipway.progress.observer import Observer
from slipway.progress.tracking import Tracked
from slipway.results.result import ExportResult
from slipway_protos.v1 import export_pb2 as pb

log = logging.getLogger("slipway.console")

_MOST_WAITING = 32
_PATIENCE_SECONDS = 10.0

Run = Callable[[LoadedConfiguration, Observer, Interruption], ExportResult]


class Job(Tracked):
    """An export that this process runs, or will run.

    Args:
        name: Its name until its export has one.
        loaded: What is exported.
        wanted: The same, for people.

    Attributes:
        export: Last part of the export's name; empty before it has one.
        message: Its newest record; None before there is one.
        failure: Why there is no result; None if there is one, or while it runs.
        result: Its result; None while it runs.
        is_over: Whether nothing of it runs any more.
    """

    def __init__(self, name: str, loaded: LoadedConfiguration, wanted: str) -> None:
        super().__init__(resuming=False)
        self.name, self.loaded, self.wanted = name, loaded, wanted
        self.created = datetime.now(UTC)
        self.interruption = Interruption()
        self.export = ""
        self.message: pb.Export | None = None
        self.result: ExportResult | None = None
        self.failure: Failure | None = None
        self.is_over = False

    def event(self, event: pb.ExportEvent) -> None:
        """Take an event of the export."""
        if event.WhichOneof("event") == "export":
            self.message, self.export = event.export, event.export.name.rpartition("/")[2]
        super().event(event)

    @property
    def names(self) -> frozenset[str]:
        """The names by which it is found."""
        return frozenset({self.name, self.export} - {""})

    @property
    def state(self) -> str:
        """Its state: that of its export, but for what happens before and after."""
        said = self.progress().state
        if self.is_over:
            if self.failure is not None:
                return "cancelled" if self.failure.reason == "CANCELLED" else "failed"
            return said or "failed"
        if self.interruption.requested:
            return "cancelling"
        return "delivering" if said in STATES_AT_END else said or "starting"


class Jobs:
    """The jobs of this process.

    Args:
        run: Runs an export to its end.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._jobs: list[Job] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        """End what runs, within seconds."""
        for job in self.present():
            job.interruption.request()
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)

    def present(self) -> list[Job]:
        """Return the jobs; of several of one export, the newest and those that are not over."""
        with self._lock:
            newest = {job.export: job for job in self._jobs}
            self._jobs = [job for job in self._jobs if not job.export or newest[job.export] is job or not job.is_over]
            return list(self._jobs)

    def find(self, name: str) -> Job | None:
        """Return the newest job of a name, or of an export's; None if there is none."""
        return next((job for job in reversed(self.present()) if name in job.names), None)

    def begin(self, loaded: LoadedConfiguration, wanted: str, *, name: str = "") -> Job:
        """Begin an export once those before it have ended.

        Args:
            loaded: What is exported.
            wanted: The same, for people.
            name: Name of the job; one that has ended is replaced. A new name by default.

        Raises:
            ServiceError: ``QUEUE_FULL``: too many wait. ``EXPORT_STATE``: a job of this name is not over.
        """
        with self._lock:
            waiting = [job for job in self._jobs if not job.is_over]
            if len(waiting) >= _MOST_WAITING:
                raise ServiceError(
                    f"{len(waiting)} exports wait already", reason="QUEUE_FULL", remedy="begin it when some have ended"
                )
            if any(name in job.names for job in waiting):
                raise ServiceError(f"{name} runs already", reason="EXPORT_STATE", remedy="look at it")
            job = Job(name or f"new-{secrets.token_hex(6)}", loaded, wanted)
            self._jobs = [*(each for each in self._jobs if not name or name not in each.names), job]
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._work, args=(job,), name=f"slipway-{job.name}", daemon=True)
            self._threads.append(thread)
        thread.start()
        return job

    def drop(self, name: str) -> None:
        """Forget the jobs of a name that are over."""
        with self._lock:
            self._jobs = [job for job in self._jobs if name not in job.names or not job.is_over]

    def _work(self, job: Job) -> None:
        try:
            job.result = self._run(job.loaded, job, job.interruption)
        except ModelExportError as error:
            job.failure = error.failure()
        except OSError as error:
            what = f"{error.filename or 'a file'} cannot be used: {error.strerror}"
            job.failure = ServiceError(
                what, reason="FILE_ERROR", remedy="see that it exists, and who may read it"
            ).failure()
        except Exception:
            log.exception("the export failed")
            remedy = "see what slipway ui has printed"
            job.failure = ServiceError("the export failed", reason="INTERNAL", remedy=remedy).failure()
        finally:
            job.is_over = True
