"""Runs runner processes and waits for them: progress on, cancellation and time limit enforced, crashes made typed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from slipway.machine.python_process import python_module
from slipway.machine.threads import thread_variables
from slipway.settings.stage_environment import stage_environment
from slipway.stage import Context
from slipway_validate.protocol.messages import RESULT_FILE, ROUND, SPEC_FILE, TIME, WAITING, Round, RunResult, Spec

STDERR_FILE = "stderr.log"
POLL_SECONDS = 0.1
TERMINATE_SECONDS = 1.0
LAST_LINES = 8


class RunnerEnded(Exception):  # noqa: N818 - a finding about one process: the output keeps what it gave before
    """A runner that was to be timed is gone, or did not answer in time; the message says why."""


def run(spec: Spec, folder: Path, ctx: Context, *, label: str, timeout_seconds: float) -> RunResult:
    """Run a spec in a process of its own and return its result; a crash or a timeout is a failed result.

    Arguments and errors are those of :func:`started`.
    """
    with started(spec, folder, ctx, label=label, timeout_seconds=timeout_seconds) as runner:
        return runner.result


@contextmanager
def started(spec: Spec, folder: Path, ctx: Context, *, label: str, timeout_seconds: float) -> Iterator[Runner]:
    """Run a spec in a process of its own, which is ended when the context is left, whatever the way.

    Args:
        spec: What to do.
        folder: New folder for spec, logits and result.
        ctx: The stage's context; its cancellation ends the process.
        label: What progress is reported as.
        timeout_seconds: The process is ended when its result, or later a round of timing, takes longer.

    Raises:
        StageError: ``CANCELLED``.
    """
    folder.mkdir(parents=True)
    (folder / SPEC_FILE).write_text(spec.model_dump_json(), encoding="utf-8")
    threads = spec.run.threads if spec.run else ctx.threads
    with _process(folder, threads=threads) as process:
        yield Runner(process, folder, ctx, label=label, timeout_seconds=timeout_seconds)


class Runner:
    """A runner process that has given its result. One with a benchmark waits, unless it failed, and can be timed.

    Attributes:
        result: What it found.
        label: What its progress is reported as.
        timeout_seconds: How long its result, and each round, may take.
    """

    def __init__(
        self, process: subprocess.Popen[str], folder: Path, ctx: Context, *, label: str, timeout_seconds: float
    ) -> None:
        self._process = process
        self._folder = folder
        self._ctx = ctx
        self.label = label
        self.timeout_seconds = timeout_seconds
        self._lines = _lines_of(process)
        self._cpu_seconds = 0.0
        self._overdue = ""
        self.result = self._first_result()

    def time_round(self) -> Round:
        """Take one round of timing.

        Raises:
            RunnerEnded: The process is gone or takes too long; it is ended then.
            StageError: ``CANCELLED``.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{TIME}\n")
            self._process.stdin.flush()
        except OSError:  # it ended while it waited
            self._process.wait()
        try:
            answer = self._wait_for(ROUND)
        except TimeoutError as error:
            self.end()
            raise RunnerEnded(f"a round did not finish within {self.timeout_seconds:g} s") from error
        if answer is None:
            raise RunnerEnded(self._overdue or _ending(self._folder, self._process.returncode)[1])
        return Round.model_validate(answer)

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    def anonymous_bytes(self) -> int:
        """Memory that it holds now, files that are mapped left out; 0 when it is gone."""
        try:
            memory = psutil.Process(self._process.pid).memory_info()
        except psutil.Error:
            return 0
        return int(memory.rss - getattr(memory, "shared", 0))

    def cpu_seconds(self) -> float:
        """Processor time that it used so far, as far as it was asked for while it was there."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self._process.pid).cpu_times()
            self._cpu_seconds = float(times.user + times.system)
        return self._cpu_seconds

    def end(self) -> None:
        """End the process, and wait until it is gone."""
        _end(self._process)

    def _first_result(self) -> RunResult:
        try:
            waits = self._wait_for(WAITING) is not None
        except TimeoutError:
            self.end()
            self._overdue = f"it did not finish within {self.timeout_seconds:g} s"
            # Where only the timing hangs, what was compared stands.
            if (self._folder / RESULT_FILE).is_file():
                return _read(self._folder)
            return RunResult(status="failed", reason="STAGE_TIMEOUT", message=self._overdue)
        if waits or (self._folder / RESULT_FILE).is_file():
            return _read(self._folder)
        reason, message = _ending(self._folder, self._process.returncode)
        return RunResult(status="failed", reason=reason, message=message)

    def _wait_for(self, key: str) -> Any:
        """Return what the process writes under a key, passing progress on; None when it ends without.

        Raises:
            TimeoutError: It takes longer than it may.
            StageError: ``CANCELLED``.
        """
        deadline = time.monotonic() + self.timeout_seconds
        while time.monotonic() < deadline:
            self._ctx.check_cancelled()
            ended = self._process.poll() is not None  # asked before the lines, so that the last of them is seen
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
        self._ctx.progress(self.label, done=done, total=total, unit="samples")


@contextmanager
def _process(folder: Path, *, threads: int) -> Iterator[subprocess.Popen[str]]:
    command = python_module("slipway_validate.runner.main", str(folder.absolute()))
    with (folder / STDERR_FILE).open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # asks for rounds of timing; its end tells the runner that we are gone
            stdout=subprocess.PIPE,
            stderr=stderr,
            encoding="utf-8",
            errors="replace",
            env=_environment(threads),
        )
    try:
        yield process
    finally:
        _end(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a line it did not read any more
                    pipe.close()


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _environment(threads: int) -> dict[str, str]:
    """A stage's, with the thread count fixed before any library starts its pool, and no way to a model hub."""
    fixed = {
        **thread_variables(threads, environment=os.environ),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**stage_environment(os.environ), **fixed}


def _lines_of(process: subprocess.Popen[str]) -> queue.SimpleQueue[str]:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    return lines


def _read_lines(pipe: IO[str], lines: queue.SimpleQueue[str]) -> None:
    try:
        for line in pipe:
            lines.put(line)
    except ValueError:  # closed by us while reading: the process was ended
        return


def _next_event(lines: queue.SimpleQueue[str]) -> dict[str, Any]:
    """Wait a moment for a line; empty when there is none. What a library prints is an event that nobody knows."""
    try:
        line = lines.get(timeout=POLL_SECONDS)
    except queue.Empty:
        return {}
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return event if isinstance(event, dict) and event else {"printed": line}


def _read(folder: Path) -> RunResult:
    return RunResult.model_validate_json((folder / RESULT_FILE).read_text(encoding="utf-8"))


def _ending(folder: Path, code: int) -> tuple[str, str]:
    """Reason and words for a process that ended early."""
    said = _last_lines(folder / STDERR_FILE)
    if code == -signal.SIGKILL:
        return "STAGE_KILLED", "its process was killed, most often by the kernel because memory ran out" + said
    if code < 0:
        return "STAGE_CRASHED", f"its process crashed in native code with {signal.Signals(-code).name}{said}"
    return "STAGE_ERROR", f"its process ended with code {code}{said}"


def _last_lines(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
    return "; it said last: " + " | ".join(lines) if lines else ""
