"""An engine whose nodes are this machine: each submission is one process, which a test can lose as a cluster loses them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipway.contracts.engine import Submission, SubmissionEnd, SubmissionReport, WorkerStart
from support.commands.cli import SLIPWAY

NODE = "here"


@dataclass
class ProcessEngine:
    """Runs workers as processes. What runs is written to ``folder``, where the next engine of the same folder finds it.

    Attributes:
        folder: Homes and logs of the workers.
        worker: How they start.
        submitted: All submissions, in order.
        hold: Start nothing: submissions wait.
        broken: Start a program that ends at once with an error.
    """

    folder: Path
    worker: WorkerStart
    submitted: list[Submission] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    hold: bool = False
    broken: bool = False

    def __post_init__(self) -> None:
        self._reports: asyncio.Queue[SubmissionReport] = asyncio.Queue()
        self._ends: dict[str, SubmissionEnd] = {}
        self._attempts: dict[str, str] = {}
        self._watching: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    async def adopt(self) -> Sequence[SubmissionReport]:
        reports = []
        for file in sorted(self.folder.glob("*.json")):
            attempt, pid = json.loads(file.read_text())
            if _lives(pid):
                self._follow(file.stem, attempt, pid)
                reports.append(SubmissionReport(file.stem, attempt, NODE))
        return reports

    async def submit(self, submission: Submission) -> None:
        self.submitted.append(submission)
        self._attempts[submission.id] = submission.attempt
        if self.hold:
            self._reports.put_nowait(SubmissionReport(submission.id, submission.attempt, message="no room"))
            return
        variables = {name: value.get_secret_value() for name, value in self.worker.environment.items()}
        environment = {**os.environ, "SLIPWAY_HOME": str(self.folder.parent), **variables}
        command = ["false"] if self.broken else [SLIPWAY, *self.worker.arguments(submission)]
        with (self.folder / f"{submission.id}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        (self.folder / f"{submission.id}.json").write_text(json.dumps([submission.attempt, process.pid]))
        self._reports.put_nowait(SubmissionReport(submission.id, submission.attempt, NODE))
        self._follow(submission.id, submission.attempt, process.pid, process)

    async def cancel(self, submission_id: str) -> None:
        self.cancelled.append(submission_id)
        self._end(submission_id, SubmissionEnd.CANCELLED, signal.SIGTERM)

    def lose(self, submission_id: str, end: SubmissionEnd) -> None:
        """End a submission as a cluster would: its worker says no word."""
        self._end(submission_id, end, signal.SIGKILL)

    async def watch(self) -> AsyncIterator[SubmissionReport]:
        while True:
            yield await self._reports.get()

    async def stop(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    def _end(self, submission_id: str, end: SubmissionEnd, number: int) -> None:
        file = self.folder / f"{submission_id}.json"
        self._ends[submission_id] = end
        if not file.exists():
            self._reports.put_nowait(SubmissionReport(submission_id, self._attempts[submission_id], end=end))
            return
        with suppress(ProcessLookupError):
            os.killpg(json.loads(file.read_text())[1], number)

    def _follow(self, name: str, attempt: str, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        task = asyncio.create_task(self._wait(name, attempt, pid, process))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _wait(self, name: str, attempt: str, pid: int, process: subprocess.Popen[bytes] | None) -> None:
        while _lives(pid) if process is None else process.poll() is None:
            await asyncio.sleep(0.02)
        (self.folder / f"{name}.json").unlink()
        good = process is None or process.returncode == 0
        end = self._ends.get(name, SubmissionEnd.EXITED if good else SubmissionEnd.FAILED)
        self._reports.put_nowait(SubmissionReport(name, attempt, NODE, end, message=f"{end} by the test"))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
