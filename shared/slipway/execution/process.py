"""Starting, watching and ending the child process of one attempt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.errors import Failure, StageError
from slipway.execution.execution import Execution
from slipway.execution.failures import failure_of_exit
from slipway.execution.memory import tree_memory
from slipway.execution.pressure import Pressure
from slipway.execution.surroundings import with_surroundings
from slipway.machine.cgroup import ControlGroup
from slipway.machine.python_process import python_module
from slipway.machine.threads import thread_variables
from slipway.observability.telemetry import record
from slipway.settings.stage_environment import stage_environment
from slipway.stage import Progress

GRACE_SECONDS = 3.0
_SAMPLE_SECONDS = 0.5
_POLL_SECONDS = 0.02

OnProgress = Callable[[Progress, int], None]
OnLog = Callable[[str, str], None]


@dataclass
class Outcome:
    """How an attempt ended: output folders, facts and digests of output files known already, or a failure."""

    outputs: dict[str, Path] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    digests: dict[Path, str] = field(default_factory=dict)
    failure: Failure | None = None
    peak_memory_bytes: int = 0


async def execute(
    execution: Execution,
    *,
    on_progress: OnProgress = lambda progress, memory: None,  # noqa: ARG005
    on_log: OnLog = lambda level, message: None,  # noqa: ARG005
) -> Outcome:
    """Run one stage in a child process and answer how it ended; never raises for what the stage does.

    Cancelling the awaiting task ends the child, politely first, and returns when it and all it started are gone.

    Args:
        execution: What to run.
        on_progress: Called with the stage's progress and the resident memory of its processes, in bytes.
        on_log: Called with level and text of each log record; what libraries print comes as ``debug``.
    """
    killed_before = _oom_kills()
    started = time.time()
    reader, writer = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *python_module("slipway.execution.child", str(writer)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(writer,),
            cwd=execution.workdir,  # ours may be a checkpoint, and libraries look for all kinds of files where they are
            env=_environment(execution),
            start_new_session=True,  # a group of its own: Ctrl-C is the parent's, and the group can be ended as one
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    child = _Child(process, execution, on_progress, on_log, started=started)
    return await child.outcome(reader, oom_killed=lambda: _oom_kills() > killed_before)


class _Child:
    """One running child and what it has said so far."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        execution: Execution,
        on_progress: OnProgress,
        on_log: OnLog,
        *,
        started: float,
    ) -> None:
        self._started = started
        self._process = process
        self._execution = execution
        self._on_progress = on_progress
        self._on_log = on_log
        self._memory_bytes = 0
        self._peak_bytes = 0
        self._pressure = Pressure(
            execution.call.stage, execution.workdir, max_memory_bytes=execution.limits.max_memory_bytes, warn=self._warn
        )
        self._result: Outcome | None = None
        self._output: deque[str] = deque(maxlen=40)

    async def outcome(self, descriptor: int, *, oom_killed: Callable[[], bool]) -> Outcome:
        """Follow the child to its end."""
        tasks = [asyncio.create_task(work) for work in (self._events(descriptor), self._prints(), self._memory())]
        failure: Failure | None = None
        try:
            self._start()
            async with asyncio.timeout(self._execution.limits.timeout_seconds or None):
                await self._exit()
        except TimeoutError:
            failure = with_surroundings(_timeout(self._execution), scratch=self._execution.workdir)
        finally:
            await asyncio.shield(self._end())
            tasks[2].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        outcome = self._result or Outcome()
        if failure is not None:
            outcome = Outcome(failure=failure)
        elif self._result is None:
            returncode = self._process.returncode or 0
            output = "\n".join(self._output)
            stage = self._execution.call.stage
            failure = failure_of_exit(returncode, stage=stage, oom_killed=oom_killed(), output=output)
            outcome = Outcome(failure=with_surroundings(failure, scratch=self._execution.workdir))
        outcome.peak_memory_bytes = self._peak_bytes
        return outcome

    def _start(self) -> None:
        """Hand the execution over; standard input stays open as the child's lifeline."""
        document = {**self._execution.to_json(), "started": self._started}
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died already; its exit says why
            self._process.stdin.write(json.dumps(document).encode() + b"\n")

    async def _end(self) -> None:
        """End the child and its group: SIGTERM, then SIGKILL after a grace."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit(), GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the leader may be gone; what it started need not be
        await self._process.wait()

    async def _exit(self) -> None:
        """Return when the child itself has ended; ``wait`` returns only when nobody holds its output open any more."""
        while self._process.returncode is None:
            await asyncio.sleep(_POLL_SECONDS)

    async def _events(self, descriptor: int) -> None:
        """Read the child's events until it closes their pipe."""
        stream = asyncio.StreamReader(limit=64 << 20)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
        )
        try:
            while line := await stream.readline():
                if line.endswith(b"\n"):  # a killed child may leave half a line
                    self._take(json.loads(line))
        finally:
            transport.close()

    def _take(self, event: dict[str, Any]) -> None:
        match event.pop("event"):
            case "progress":
                self._on_progress(Progress(**event), self._memory_bytes)
            case "log":
                self._on_log(event["level"], event["message"])
            case "peak":
                self._peak_bytes = max(self._peak_bytes, event["memory_bytes"])
            case "span":
                record(**event)
            case "result":
                outputs = {name: Path(path) for name, path in event["outputs"].items()}
                digests = {Path(path): digest for path, digest in event["digests"].items()}
                self._result = Outcome(outputs=outputs, facts=event["facts"], digests=digests)
            case "failure":
                self._result = Outcome(failure=Failure.from_json(event["failure"]))

    async def _prints(self) -> None:
        """Keep the last lines that libraries print, and pass all on as debug messages."""
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # a line longer than the buffer: progress bars without an end
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._output.append(text)
            self._on_log("debug", text)

    async def _memory(self) -> None:
        """Sample the memory of the child and what it started, and say what it comes close to."""
        while True:
            memory = tree_memory(self._process.pid)
            self._memory_bytes = memory.resident
            self._peak_bytes = max(self._peak_bytes, memory.peak)
            self._pressure.look(memory)
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _warn(self, message: str) -> None:
        self._on_log("warning", message)


def _environment(execution: Execution) -> dict[str, str]:
    """What the child needs of ours; threads limited and asleep while they wait, libraries kept from the network."""
    if execution.environment is not None:
        return {**execution.environment, "PYTHONUNBUFFERED": "1"}
    environment = stage_environment(os.environ)
    environment |= thread_variables(execution.limits.threads, environment=environment)
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",  # libraries open files, and print, without saying in which encoding
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "TQDM_DISABLE": "1",
    }
    return environment


def _oom_kills() -> int:
    """Processes the kernel has killed for memory, in this container or else since boot (Linux; 0 elsewhere)."""
    kills = ControlGroup().memory_kills()
    if kills is not None:
        return kills
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _timeout(execution: Execution) -> Failure:
    return StageError(
        f"{execution.call.stage} took longer than {execution.limits.timeout_seconds:g} s",
        reason="STAGE_TIMEOUT",
        remedy="give it more time, or run nothing beside it",
    ).failure()
