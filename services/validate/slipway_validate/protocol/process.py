"""Run runner processes and wait for them: report progress, enforce cancellation and time limit, type crashes."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from slipway.errors import Failure
from slipway.execution.child_process import ChildProcess, child_environment
from slipway.files.json_documents import LARGEST_LIST, parse_json
from slipway.files.regular_file import read_regular
from slipway.stage import Context
from slipway_validate.protocol.messages import (
    BEGIN,
    IMPORTED,
    RESULT_FILE,
    ROUND,
    SPEC_FILE,
    TIME,
    WAITING,
    Round,
    RunResult,
    Spec,
)

STDERR_FILE = "stderr.log"
POLL_SECONDS = 0.1
LAST_LINES = 8


class RunnerEnded(Exception):  # noqa: N818 - a finding about one process: the output keeps what it gave before
    """A runner ended, or took too long, before it was timed; the message says why."""


def run(spec: Spec, folder: Path, ctx: Context, *, label: str, timeout_seconds: float) -> RunResult:
    """Run a spec in its own process and return its result; a crash or a timeout is a failed result.

    Arguments and errors are those of :func:`start_runner`.
    """
    with start_runner(spec, folder, ctx, label=label, timeout_seconds=timeout_seconds) as runner:
        return runner.result


@contextmanager
def start_runner(spec: Spec, folder: Path, ctx: Context, *, label: str, timeout_seconds: float) -> Iterator[Runner]:
    """Start a spec in its own process, and end the process when the context is left. Reading the runner's result waits for it.

    Args:
        spec: The work to do.
        folder: New folder for spec, logits and result.
        ctx: The stage's context; its cancellation ends the process.
        label: Name under which progress is reported.
        timeout_seconds: Longest time until the result, and later for a round of timing; then the process is ended.

    Raises:
        StageError: ``CANCELLED``.
    """
    folder.mkdir(parents=True)
    (folder / SPEC_FILE).write_text(spec.model_dump_json(), encoding="utf-8")
    threads = spec.run.threads if spec.run else ctx.threads
    with (
        (folder / STDERR_FILE).open("w", encoding="utf-8") as errors,
        ChildProcess(
            "slipway_validate.runner.main",
            str(folder.absolute()),
            environment=child_environment(threads),
            errors=errors,
        ) as process,
    ):
        yield Runner(process, folder, ctx, label=label, timeout_seconds=timeout_seconds)


class Runner:
    """A runner process. One with a benchmark waits with its result, unless it failed, and can be timed.

    Attributes:
        label: Name under which its progress is reported.
        timeout_seconds: Longest time for its result, and for each round.
    """

    def __init__(
        self, process: ChildProcess, folder: Path, ctx: Context, *, label: str, timeout_seconds: float
    ) -> None:
        self._process = process
        self._folder = folder
        self._ctx = ctx
        self.label = label
        self.timeout_seconds = timeout_seconds
        self._lines = _lines_of(process)
        self._cpu_seconds = 0.0
        self._overdue = ""

    @cached_property
    def result(self) -> RunResult:
        """Return its result; the first call waits for it.

        Raises:
            StageError: ``CANCELLED``.
        """
        return self._first_result()

    def wait_for_imports(self) -> None:
        """Wait until a held process has imported its libraries, or has ended.

        Raises:
            StageError: ``CANCELLED``.
        """
        with contextlib.suppress(TimeoutError):  # the wait for its result will say so
            self._wait_for(IMPORTED)

    def begin(self) -> None:
        """Let a held process go on."""
        self._process.send(f"{BEGIN}\n".encode())

    def time_round(self) -> Round:
        """Time one round.

        Raises:
            RunnerEnded: The process has ended, or takes too long and was ended now.
            StageError: ``CANCELLED``.
        """
        _ = self.result  # its lines are read in their order
        self._process.send(f"{TIME}\n".encode())
        try:
            answer = self._wait_for(ROUND)
        except TimeoutError as error:
            self.end()
            raise RunnerEnded(f"a round did not finish within {self.timeout_seconds:g} s") from error
        if answer is None:
            raise RunnerEnded(self._overdue or self._explain_end().message)
        return Round.model_validate(answer)

    @property
    def alive(self) -> bool:
        """Return whether the process is still alive."""
        return self._process.alive

    def anonymous_bytes(self) -> int:
        """Return its present memory in bytes without mapped files; 0 if it has ended."""
        try:
            memory = psutil.Process(self._process.pid).memory_info()
        except psutil.Error:
            return 0
        return int(memory.rss - getattr(memory, "shared", 0))

    def cpu_seconds(self) -> float:
        """Return the processor time that it has used so far; after its end, the last value read before."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self._process.pid).cpu_times()
            self._cpu_seconds = float(times.user + times.system)
        return self._cpu_seconds

    def end(self) -> None:
        """End the process, and wait for its end."""
        self._process.end()

    def _first_result(self) -> RunResult:
        try:
            waits = self._wait_for(WAITING) is not None
        except TimeoutError:
            self.end()
            self._overdue = f"it did not finish within {self.timeout_seconds:g} s"
            # If only the timing hangs, the comparison stays valid.
            if (self._folder / RESULT_FILE).is_file():
                return _read(self._folder)
            return RunResult(status="failed", reason="STAGE_TIMEOUT", message=self._overdue)
        if waits or (self._folder / RESULT_FILE).is_file():
            return _read(self._folder)
        failure = self._explain_end()
        return RunResult(status="failed", reason=failure.reason, message=failure.message)

    def _explain_end(self) -> Failure:
        """Return why the process ended early."""
        said = (self._folder / STDERR_FILE).read_text(encoding="utf-8", errors="replace")
        return self._process.explain(name=self.label, said="\n".join(said.strip().splitlines()[-LAST_LINES:]))

    def _wait_for(self, key: str) -> Any:
        """Return the value that the process writes under a key, and report its progress; None if it ends without one.

        Raises:
            TimeoutError: It takes longer than its time limit.
            StageError: ``CANCELLED``.
        """
        deadline = time.monotonic() + self.timeout_seconds
        while time.monotonic() < deadline:
            self._ctx.check_cancelled()
            ended = not self._process.alive  # read before the lines, so that none of them is missed
            event = _next_event(self._lines)
            if key in event:
                return event[key]
            if event:
                self._progress(event)
            elif ended:
                return None
        raise TimeoutError

    def _progress(self, event: dict[str, Any]) -> None:
        try:
            done, total = int(event["done"]), int(event["total"])
        except (ValueError, KeyError, TypeError):  # a library printed something
            return
        self._ctx.progress(
            self.label, done=done, total=total, unit="layers" if event.get("unit") == "layers" else "samples"
        )


def _lines_of(process: ChildProcess) -> queue.SimpleQueue[bytes]:
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(ValueError):  # closed by us while reading: the process was ended
            for line in process.output:
                lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _next_event(lines: queue.SimpleQueue[bytes]) -> dict[str, Any]:
    """Wait briefly for a line; empty if there is none. A line printed by a library becomes an event with an unused key."""
    try:
        line = lines.get(timeout=POLL_SECONDS)
    except queue.Empty:
        return {}
    try:
        event = parse_json(line, lenient=True)
    except ValueError:
        event = None
    return event if isinstance(event, dict) and event else {"printed": line}


def _read(folder: Path) -> RunResult:
    return RunResult.model_validate_json(read_regular(folder / RESULT_FILE, largest=LARGEST_LIST))
