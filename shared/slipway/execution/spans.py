"""Spans of a child process: one for the process and one for each phase its stage reports, without a tracing library.

They are sent to the parent as events as soon as they are over, so what a crashed child went through is known up to its last
phase. The parent hands them on under the ids they have here.
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
    """What a child does, as spans below the one that started it; nothing without a trace.

    Args:
        send: Takes an event's kind and fields.
        stage: Name of the stage.
        traceparent: Span of the worker; empty without a trace.
        started: When the worker started this process, in seconds since the epoch.
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
        """Begin a phase, which ends the one before; nothing when it goes on."""
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
