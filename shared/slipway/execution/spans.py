"""Record the spans of a child process without a tracing library: one for the process and one per phase that its stage reports.

Each span is sent to the parent as an event when it ends, so the phases of a crashed child are known up to its last one. The parent
exports the spans under the ids given here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from slipway.errors import Failure
from slipway.observability.telemetry import is_traceparent

Send = Callable[..., None]


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
        self._identity = _below(traceparent)
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
            self._write(self._phase[0], _below(self._identity), self._identity, self._phase[1], now)

    def _write(self, name: str, identity: str, parent: str, start: float, end: float, **more: Any) -> None:
        if identity:
            facts = {"process.pid": os.getpid(), "slipway.stage": self._stage}
            self._send(
                "span", name=name, identity=identity, parent=parent, start=start, end=end, attributes=facts, **more
            )


def _below(traceparent: str) -> str:
    if not is_traceparent(traceparent):
        return ""
    _, trace_id, _, flags = traceparent.split("-")
    return f"00-{trace_id}-{os.urandom(8).hex()}-{flags}"
