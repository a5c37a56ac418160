"""Start, watch and end the child process of one attempt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from slipway.errors import Failure, StageError
from slipway.execution.child_process import GRACE_SECONDS, ChildProcess, child_environment
from slipway.execution.execution import Execution
from slipway.execution.failures import failure_of, with_surroundings
from slipway.execution.memory_curve import MemoryCurve, MemoryOverTime
from slipway.execution.pressure import Pressure, tree_memory
from slipway.observability.telemetry import record
from slipway.parts import Adopted
from slipway.stage import Progress

_SAMPLE_SECONDS = 0.5
_SAMPLE_SHARE = 0.02
"""Largest share of a core for memory samples: for processes of some GB, the kernel needs a good part of a second to count shared memory."""
_POLL_SECONDS = 0.02

OnProgress = Callable[[Progress, int], None]
OnLog = Callable[[str, str], None]


@dataclass
class Outcome:
    """The end of an attempt: output folders, facts, the already known digests of output files and adopted ones, or a failure."""

    outputs: dict[str, Path] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    digests: dict[Path, str] = field(default_factory=dict)
    adopted: list[Adopted] = field(default_factory=list)
    failure: Failure | None = None
    peak_memory_bytes: int = 0
    memory: MemoryOverTime = field(default_factory=MemoryOverTime)


async def execute(
    execution: Execution,
    *,
    on_progress: OnProgress = lambda progress, memory: None,  # noqa: ARG005
    on_log: OnLog = lambda level, message: None,  # noqa: ARG005
) -> Outcome:
    """Run one stage in a child process and return its outcome; never raise because of the stage.

    Cancelling the awaiting task asks the child to end, kills it after a grace period, and returns when it and all it started are gone.

    Args:
        execution: The attempt to run.
        on_progress: Called with the stage's progress and the resident memory of its processes, in bytes.
        on_log: Called with level and text of each log record; lines that libraries print have the level ``debug``.
    """
    execution = replace(execution, started=time.time())
    if execution.environment is None:
        environment = child_environment(execution.limits.threads)
    else:
        environment = {**execution.environment, "PYTHONUNBUFFERED": "1"}
    reader, writer = os.pipe()
    try:
        process = ChildProcess(
            "slipway.execution.child_main",
            str(writer),
            environment=environment,
            workdir=execution.workdir,
            descriptors=(writer,),
            own_group=True,
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return await _Child(process, execution, on_progress, on_log).outcome(reader)


class _Child:
    """One running child, and the events received from it."""

    def __init__(self, process: ChildProcess, execution: Execution, on_progress: OnProgress, on_log: OnLog) -> None:
        self._process = process
        self._execution = execution
        self._on_progress = on_progress
        self._on_log = on_log
        self._memory_bytes = 0
        self._peak_bytes = 0
        self._curve = MemoryCurve(_SAMPLE_SECONDS)
        self._pressure = Pressure(
            execution.call.stage, execution.workdir, max_memory_bytes=execution.limits.max_memory_bytes, warn=self._warn
        )
        self._result: Outcome | None = None
        self._output: deque[str] = deque(maxlen=40)

    async def outcome(self, descriptor: int) -> Outcome:
        """Follow the child to its end and return its outcome."""
        tasks = [
            asyncio.create_task(work)
            for work in (self._read_events(descriptor), self._read_output(), self._sample_memory())
        ]
        lifeline: asyncio.WriteTransport | None = None
        failure: Failure | None = None
        try:
            loop = asyncio.get_running_loop()
            lifeline, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.input)
            lifeline.write(self._execution.line())
            async with asyncio.timeout(self._execution.limits.timeout_seconds or None):
                await self._wait_for_exit()
        except TimeoutError:
            failure = with_surroundings(_timeout_failure(self._execution), scratch=self._execution.workdir)
        finally:
            await asyncio.shield(self._end())
            (lifeline or self._process.input).close()
            tasks[2].cancel()
            events, *_ = await asyncio.gather(*tasks, return_exceptions=True)
        outcome, stage = self._result or Outcome(), self._execution.call.stage
        if failure is not None:
            outcome = Outcome(failure=failure)
        elif self._result is None:
            if isinstance(events, Exception):  # an event could not be read or shown, so the child could send no more
                failure = failure_of(events, stage=stage)
            else:
                failure = self._process.explain(name=stage, said="\n".join(self._output))
            outcome = Outcome(failure=with_surroundings(failure, scratch=self._execution.workdir))
        outcome.peak_memory_bytes, outcome.memory = self._peak_bytes, self._curve.result()
        return outcome

    async def _end(self) -> None:
        """End the child and its group without blocking the event loop."""
        self._process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_for_exit(), GRACE_SECONDS)
        self._process.kill()
        await self._wait_for_exit()

    async def _wait_for_exit(self) -> None:
        """Wait for the child itself; processes that it started may hold its output open for longer."""
        while self._process.alive:
            await asyncio.sleep(_POLL_SECONDS)

    async def _read_events(self, descriptor: int) -> None:
        """Read the child's events until it closes the pipe."""
        async with _open_reader(os.fdopen(descriptor, "rb", buffering=0), limit=64 << 20) as stream:
            while line := await stream.readline():
                if line.endswith(b"\n"):  # a killed child may leave half a line
                    self._take(json.loads(line))

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
                adopted = [Adopted(**each) for each in event["adopted"]]
                self._result = Outcome(outputs=outputs, facts=event["facts"], digests=digests, adopted=adopted)
            case "failure":
                self._result = Outcome(failure=Failure.from_json(event["failure"]))

    async def _read_output(self) -> None:
        """Keep the last lines of the child's output, and log every line as a debug message."""
        async with _open_reader(self._process.output, limit=64 << 10) as stream:
            while True:
                try:
                    line = await stream.readline()
                except ValueError:  # a line longer than the buffer, such as an endless progress bar
                    continue
                if not line:
                    return
                text = line.decode(errors="replace").rstrip()
                self._output.append(text)
                self._on_log("debug", text)

    async def _sample_memory(self) -> None:
        """Sample the memory of the child and its descendants, and warn when a limit is near."""
        started = time.monotonic()
        while True:
            begin = time.thread_time()
            memory = tree_memory(self._process.pid)
            self._memory_bytes = memory.resident
            self._peak_bytes = max(self._peak_bytes, memory.peak)
            self._curve.add(memory.resident, time.monotonic() - started)
            self._pressure.check(memory)
            await asyncio.sleep(max(_SAMPLE_SECONDS, (time.thread_time() - begin) / _SAMPLE_SHARE))

    def _warn(self, message: str) -> None:
        self._on_log("warning", message)


@contextlib.asynccontextmanager
async def _open_reader(pipe: IO[bytes], *, limit: int) -> AsyncIterator[asyncio.StreamReader]:
    """Read a pipe in lines of at most ``limit`` bytes; close it with the context."""
    stream = asyncio.StreamReader(limit=limit)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        yield stream
    finally:
        transport.close()


def _timeout_failure(execution: Execution) -> Failure:
    return StageError(
        f"{execution.call.stage} took longer than {execution.limits.timeout_seconds:g} s",
        reason="STAGE_TIMEOUT",
        remedy="allow more time, or run nothing else beside it",
    ).failure()
