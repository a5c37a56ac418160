"""The child process, ``python -P -m slipway.execution.child_main``: run one attempt of one stage, and report one result.

The child reads the execution from standard input as one line of JSON. Standard input then stays open: when it closes, the parent is
gone, and the child and everything it started end too. The child writes events to the file descriptor named on the command line, one
JSON object a line: ``progress``, ``log``, ``span``, ``peak``, ``result`` or ``failure``. Standard output and error are left to libraries.

Spans are recorded without a tracing library: one for the process and one per phase that the stage reports. Each is sent when it
ends, so the phases of a crashed child are known up to its last one. The parent exports them under the ids given here.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipway.errors import Failure, StageError
from slipway.execution.execution import Execution
from slipway.execution.failures import failure_of, with_surroundings
from slipway.execution.pressure import own_peak_memory
from slipway.machine.libraries import missing_library_error
from slipway.observability.telemetry import is_traceparent
from slipway.registry import load_stage
from slipway.stage import Context, Progress
from slipway.stage_call import StageCall

_PROGRESS_INTERVAL_SECONDS = 0.1
_OBJECTS_BETWEEN_COLLECTIONS = 5_000
"""With Python's 700, a stage that imports torch and builds a graph spends a fifth of its time on collections."""

Send = Callable[..., None]


class Events:
    """Writes events to the parent, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._last: tuple[str, float] = ("", 0.0)

    def send(self, kind: str, **fields: Any) -> None:
        """Write one event, whole even if several threads send at once."""
        line = json.dumps({"event": kind, **fields}, default=str).encode() + b"\n"
        with self._lock:
            view = memoryview(line)
            while view:
                view = view[os.write(self._descriptor, view) :]

    def progress(self, progress: Progress) -> None:
        """Send progress at most ten times a second; always send a new phase and the end of a phase."""
        now = time.monotonic()
        phase, sent = self._last
        if phase == progress.phase and progress.done != progress.total and now - sent < _PROGRESS_INTERVAL_SECONDS:
            return
        self._last = (progress.phase, now)
        self.send("progress", phase=progress.phase, done=progress.done, total=progress.total, unit=progress.unit)


class EventHandler(logging.Handler):
    """Sends log records to the parent."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record, with its traceback."""
        self._events.send("log", level=record.levelname.lower(), message=self.format(record))


def main() -> int:
    """Run the execution given on standard input."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    events = Events(int(sys.argv[1]))
    cancelled = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: cancelled.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    execution = Execution.parse(sys.stdin.buffer.readline())
    _end_with_parent()
    _yield_memory_first()
    logger = logging.getLogger("slipway.stage")
    logger.addHandler(EventHandler(events))
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    spans = Spans(events.send, execution.call.stage, traceparent=execution.traceparent, started=execution.started)

    def on_progress(progress: Progress) -> None:
        spans.phase(progress.phase)
        events.progress(progress)

    ctx = Context(
        workdir=execution.workdir,
        kept=execution.kept,
        input_digests=execution.input_digests,
        log=logger,
        max_memory_bytes=execution.limits.max_memory_bytes,
        threads=execution.limits.threads,
        on_progress=on_progress,
        cancelled=cancelled,
    )
    spans.phase("prepare")
    failure = _run(execution.call, ctx, events)
    spans.end(failure)
    events.send("peak", memory_bytes=own_peak_memory())  # the parent only samples, so it may have missed the peak
    if failure is not None:
        events.send("failure", failure=failure.to_json())
    # Exit without destructors, because those of native libraries may hang or crash. All results are written.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(call: StageCall, ctx: Context, events: Events) -> Failure | None:
    """Run the stage; turn every exception into a failure."""
    name, stage = call.stage, None
    try:
        stage = call.step(load_stage(name))
        inputs = {key: Path(folder) for key, folder in call.inputs.items()}
        outputs = stage.run(inputs, call.params_of(stage), ctx)
        ctx.check_cancelled()
        _check_outputs(stage.name, stage.outputs, outputs, ctx.workdir)
        events.send(
            "result",
            outputs={key: str(path) for key, path in outputs.items()},
            facts=ctx.facts,
            digests={str(path): digest for path, digest in ctx.digests.items()},
            adopted=[asdict(each) for each in ctx.adopted],
        )
    except BaseException as error:  # the boundary: a stage may raise anything
        if ctx.cancelled.is_set():
            return StageError(f"{name} was cancelled", reason="CANCELLED").failure()
        lacking = missing_library_error(stage, error) if stage is not None else None
        failure = with_surroundings(failure_of(lacking or error, stage=name), scratch=ctx.workdir)
        ctx.log.debug("the attempt ended with %s", failure.reason, exc_info=error)
        return failure
    return None


def _check_outputs(stage: str, names: tuple[str, ...], outputs: dict[str, Path], workdir: Path) -> None:
    """Check that the stage returned exactly the folders it declares, below its work folder."""
    if sorted(outputs) != sorted(names):
        raise StageError(f"{stage} declares the outputs {sorted(names)} but returned {sorted(outputs)}")
    for name, path in outputs.items():
        if not path.is_dir() or not path.resolve().is_relative_to(workdir.resolve()):
            raise StageError(f"{stage} returned {path} as {name!r}, which is not a folder below its work folder")


def _end_with_parent() -> None:
    """End this process and all it started when the parent closes standard input, on purpose or by dying.

    A separate process in the same group does this. A thread could wait for ever while native code holds the interpreter, and a
    signal on the parent's death would reach only this process.
    """
    script = "while read -r _; do :; done; kill -s KILL 0"
    # It must not inherit this process's output: the parent waits until every holder of those pipes is gone.
    subprocess.Popen(["/bin/sh", "-c", script], stdin=0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _yield_memory_first() -> None:
    """Make the kernel kill this process first if memory runs out, and not the worker that started it (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


class Spans:
    """Spans of a child below the span that started it; without a trace, nothing is recorded.

    Args:
        send: Function that takes an event's kind and fields.
        stage: Name of the stage.
        traceparent: Span of the worker; empty without a trace.
        started: Time at which the worker started this process, in seconds since the epoch.
    """

    def __init__(self, send: Send, stage: str, *, traceparent: str, started: float) -> None:
        self._send = send
        self._stage = stage
        self._parent = traceparent
        self._started = started
        self._identity = _child_span(traceparent)
        self._phase: tuple[str, float] | None = ("start", started)
        self._lock = threading.Lock()

    def phase(self, name: str) -> None:
        """End the previous phase and begin a new one; do nothing if the phase is the same."""
        with self._lock:
            if self._phase is None or self._phase[0] == name:
                return
            now = time.time()
            self._end_phase(now)
            self._phase = (name, now)

    def end(self, failure: Failure | None) -> None:
        """End the last phase and the process's own span."""
        with self._lock:
            now = time.time()
            self._end_phase(now)
            self._phase = None
            reason = None if failure is None else (failure.reason, failure.message)
            self._write(f"{self._stage} process", self._identity, self._parent, self._started, now, failure=reason)

    def _end_phase(self, now: float) -> None:
        if self._phase is not None:
            self._write(self._phase[0], _child_span(self._identity), self._identity, self._phase[1], now)

    def _write(self, name: str, identity: str, parent: str, start: float, end: float, **more: Any) -> None:
        if identity:
            facts = {"process.pid": os.getpid(), "slipway.stage": self._stage}
            self._send(
                "span", name=name, identity=identity, parent=parent, start=start, end=end, attributes=facts, **more
            )


def _child_span(traceparent: str) -> str:
    if not is_traceparent(traceparent):
        return ""
    _, trace_id, _, flags = traceparent.split("-")
    return f"00-{trace_id}-{os.urandom(8).hex()}-{flags}"


if __name__ == "__main__":
    raise SystemExit(main())
