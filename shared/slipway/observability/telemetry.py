"""OpenTelemetry spans: off unless ``SLIPWAY_TRACING`` is set. Only this package uses OpenTelemetry.

A span's parent is a W3C ``traceparent`` text, so it passes through plans, leases and processes as plain data. While tracing is off,
calls cost nothing.

There are two kinds of spans. :func:`span` surrounds a block and is lost if the process dies in it. :func:`record` writes a finished
span from facts; with an id derived from its subject (:func:`derive_span`) it can be written again after a crash as the same span.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slipway.distribution import require
from slipway.observability.otlp import SEND_SECONDS, resource_attributes, span_exporter
from slipway.texts import redact

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from slipway.settings import Settings

Kind = Literal["internal", "server", "client", "producer", "consumer"]

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_NO_SPAN = "0" * 16
_SAMPLED = 1
"""Bit of a traceparent's flags."""


@dataclass(frozen=True, slots=True)
class _Recorder:
    provider: TracerProvider
    processor: SpanProcessor


_recorder: _Recorder | None = None
_users = 0
_lock = threading.Lock()
"""Held where the two above change: exports of one process may overlap."""
# The trace of the current block, for its log lines, also while this process records no spans.
_within: ContextVar[str] = ContextVar("slipway_traceparent", default="")


@contextlib.contextmanager
def tracing(settings: Settings, *, service: str = "slipway") -> Iterator[None]:
    """Record spans while the block runs, as configured; at the end of the last such block send the rest within 3 s.

    Args:
        settings: ``tracing`` is ``otlp``, ``console`` or empty (off).
        service: Name the spans appear under.
    """
    if not settings.tracing:
        yield
        return
    require("telemetry", what=f"SLIPWAY_TRACING={settings.tracing}", otherwise="unset it")
    with _using_recorder(lambda: span_exporter(settings), service):
        yield


@contextlib.contextmanager
def recording(exporter: SpanExporter, *, service: str = "slipway") -> Iterator[None]:
    """Record spans into an exporter while the block runs."""
    with _using_recorder(lambda: exporter, service):
        yield


@contextlib.contextmanager
def _using_recorder(make_exporter: Callable[[], SpanExporter], service: str) -> Iterator[None]:
    """Use the process's recorder in a block. The first of overlapping blocks starts it, and the last to end stops it."""
    global _recorder, _users  # noqa: PLW0603 - a process has one provider, as OpenTelemetry itself does
    with _lock:
        if _recorder is None:
            _recorder = _start(make_exporter(), service)
        _users += 1
    try:
        yield
    finally:
        ended = None
        with _lock:
            _users -= 1
            if not _users:
                ended, _recorder = _recorder, None
        if ended is not None:
            ended.provider.force_flush(round(SEND_SECONDS * 1000))
            ended.provider.shutdown()


def _start(exporter: SpanExporter, service: str) -> _Recorder:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource(resource_attributes(service))  # not the default one, which runs detectors
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    processor = BatchSpanProcessor(exporter, schedule_delay_millis=500)
    provider.add_span_processor(processor)
    return _Recorder(provider, processor)


@contextlib.contextmanager
def span(
    name: str,
    *,
    parent: str = "",
    attributes: Mapping[str, Any] | None = None,
    links: tuple[str, ...] = (),
    kind: Kind = "internal",
) -> Iterator[Span]:
    """Record a span around a block; an error that leaves the block marks the span as failed.

    Args:
        name: Name of the operation, such as ``stage merge``.
        parent: ``traceparent`` of the span this belongs to; empty takes the current one, if any.
        attributes: Facts: texts, numbers, truth values or lists of them.
        links: ``traceparent`` texts of related spans, such as the attempt before a retry.
        kind: Which side of a call or of a queue it is, if any.
    """
    recorder = _recorder  # another thread may end it
    if recorder is None:
        with within(parent or _within.get()):
            yield Span(None)
        return
    from opentelemetry import trace

    tracer = recorder.provider.get_tracer("slipway")
    linked = [trace.Link(context) for link in links if (context := _span_context(link)) is not None]
    with tracer.start_as_current_span(
        name,
        context=_context_within(parent),
        kind=trace.SpanKind[kind.upper()],
        attributes=_redact_attributes(attributes or {}),
        links=linked,
        record_exception=False,
        set_status_on_exception=False,
    ) as it:
        running = Span(it)
        try:
            yield running
        except Exception as error:
            running.record_error(error)
            raise


class Span:
    """A running span, or nothing while tracing is off."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def set(self, **attributes: Any) -> None:
        """Add facts that became known later."""
        if self._span is not None:
            self._span.set_attributes(_redact_attributes(attributes))

    def fail(self, reason: str, message: str) -> None:
        """Mark the span as failed without raising."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, redact(message)))
            self._span.set_attribute("slipway.reason", reason)

    def record_error(self, error: Exception) -> None:
        """Mark the span as failed by an exception, with its redacted traceback; OpenTelemetry's own method would show secrets."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            trace = "".join(traceback.format_exception(error))
            facts = {"type": kind, "message": str(error), "stacktrace": trace}
            self._span.add_event("exception", {f"exception.{name}": redact(text) for name, text in facts.items()})
            self._span.set_status(Status(StatusCode.ERROR, redact(f"{type(error).__name__}: {error}")))

    @property
    def traceparent(self) -> str:
        """This span as a parent for others; empty while tracing is off."""
        return _traceparent(self._span.get_span_context()) if self._span is not None else ""


def record(
    name: str,
    *,
    identity: str,
    parent: str,
    start: float,
    end: float,
    attributes: Mapping[str, Any] | None = None,
    links: tuple[str, ...] = (),
    failure: tuple[str, str] | None = None,
    kind: Kind = "internal",
) -> None:
    """Write a finished span.

    Args:
        name: Name of the operation.
        identity: ``traceparent`` of the span itself.
        parent: ``traceparent`` of the span it belongs to.
        start: Beginning, in seconds since the epoch.
        end: End, likewise.
        attributes: Facts.
        links: ``traceparent`` texts of related spans.
        failure: Reason and message, if it failed.
        kind: As in :func:`span`.
    """
    recorder = _recorder
    if recorder is None:
        return
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    context, above = _span_context(identity), _span_context(parent)
    if context is None or not context.is_valid or not context.trace_flags.sampled:
        return
    facts = _redact_attributes(attributes or {})
    status = trace.Status(trace.StatusCode.UNSET)
    if failure is not None:
        facts["slipway.reason"], status = failure[0], trace.Status(trace.StatusCode.ERROR, redact(failure[1]))
    recorder.processor.on_end(
        ReadableSpan(
            name,
            context=context,
            kind=trace.SpanKind[kind.upper()],
            parent=above if above is not None and above.is_valid else None,
            resource=recorder.provider.resource,
            attributes=facts,
            links=[trace.Link(linked) for link in links if (linked := _span_context(link)) is not None],
            status=status,
            start_time=round(start * 1e9),
            end_time=round(end * 1e9),
            instrumentation_scope=InstrumentationScope("slipway"),
        )
    )


def new_trace() -> str:
    """Return a new trace, as the parent of its first span."""
    return f"00-{os.urandom(16).hex()}-{_NO_SPAN}-01"


def is_traceparent(text: str) -> bool:
    """Return whether a text from outside names a trace."""
    return _TRACEPARENT.fullmatch(text) is not None


def derive_span(traceparent: str, *about: object) -> str:
    """Return a span of the same trace with an id derived from its subject; empty without a trace."""
    if not is_traceparent(traceparent):
        return ""
    _, trace_id, _, flags = traceparent.split("-")
    span_id = hashlib.sha256("\n".join((trace_id, *map(str, about))).encode()).hexdigest()[:16]
    return f"00-{trace_id}-{span_id}-{flags}"


@contextlib.contextmanager
def within(traceparent: str) -> Iterator[None]:
    """Set the trace of a block, so that its log lines name it."""
    token = _within.set(traceparent)
    try:
        yield
    finally:
        _within.reset(token)


def current_traceparent() -> str:
    """Return the current span as a parent for others, or the trace that the block is :func:`within`; empty without either."""
    if _recorder is None:
        return _within.get()
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    return _traceparent(context) if context.is_valid else _within.get()


def current_trace_id() -> str:
    """Return the current trace as 32 hexadecimal digits; empty without one."""
    return current_traceparent()[3:35]


def recorded_trace_id(traceparent: str) -> str:
    """Return the trace of a span as 32 hexadecimal digits; empty if it is not sampled, or this process records no spans."""
    is_recorded = _recorder is not None and is_traceparent(traceparent) and int(traceparent[-2:], 16) & _SAMPLED
    return traceparent[3:35] if is_recorded else ""


def traceparent_of(trace_id: str) -> str:
    """Return a trace of which only the id is known, not whether it is sampled; empty for a text that is no id."""
    traceparent = f"00-{trace_id}-{_NO_SPAN}-00"
    return traceparent if is_traceparent(traceparent) else ""


def _redact_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts of a span without secrets in their texts, or in texts of their lists."""

    def clean(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [clean(part) for part in value]
        return redact(value) if isinstance(value, str) else value

    return {name: clean(value) for name, value in attributes.items()}


def _traceparent(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _span_context(traceparent: str) -> Any:
    from opentelemetry import trace

    if not is_traceparent(traceparent):
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    return trace.SpanContext(
        trace_id=int(trace_id, 16),
        span_id=int(span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(flags, 16)),
    )


def _context_within(parent: str) -> Any:
    """Return OpenTelemetry's context within a span; None for a text that is no ``traceparent``."""
    from opentelemetry import trace

    context = _span_context(parent)
    return trace.set_span_in_context(trace.NonRecordingSpan(context)) if context is not None else None
