"""OpenTelemetry spans: off unless ``SLIPWAY_TRACING`` is set, and then nothing but this module knows of it.

A span's parent is a W3C ``traceparent`` text, so that it travels through plans, leases and processes as plain data. While
tracing is off every call here is free and gives empty texts.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from slipway.settings import Settings

_FLUSH_MILLISECONDS = 3000
_provider: TracerProvider | None = None


@contextlib.contextmanager
def tracing(settings: Settings, *, service: str = "slipway") -> Iterator[None]:
    """Record spans while the block runs, as the settings say; sends what is left at the end, for at most 3 s.

    Args:
        settings: ``tracing`` is ``otlp``, ``console`` or empty (off).
        service: Name the spans appear under.
    """
    if not settings.tracing or _provider is not None:
        yield
        return
    with recording(_exporter(settings), service=service):
        yield


@contextlib.contextmanager
def recording(exporter: SpanExporter, *, service: str = "slipway") -> Iterator[None]:
    """Record spans into an exporter while the block runs."""
    global _provider  # noqa: PLW0603 - a process has one provider, as OpenTelemetry itself does
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from slipway.stage import installed_version

    # A resource of our own: the default one runs detectors and reads the environment.
    provider = TracerProvider(
        resource=Resource({"service.name": service, "service.version": installed_version("slipway")}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    _provider = provider
    try:
        yield
    finally:
        _provider = None
        provider.force_flush(_FLUSH_MILLISECONDS)
        provider.shutdown()


@contextlib.contextmanager
def span(
    name: str, *, parent: str = "", attributes: Mapping[str, Any] | None = None, links: tuple[str, ...] = ()
) -> Iterator[Span]:
    """Record a span around a block; an error that leaves the block marks the span as failed.

    Args:
        name: What is done, such as ``stage merge``.
        parent: ``traceparent`` of the span this belongs to; empty takes the current one, if any.
        attributes: Facts: texts, numbers, truth values or lists of them.
        links: ``traceparent`` texts of related spans, such as the attempt before a retry.
    """
    if _provider is None:
        yield Span(None)
        return
    from opentelemetry import trace

    tracer = _provider.get_tracer("slipway")
    linked = [trace.Link(context) for link in links if (context := _span_context(link)) is not None]
    with tracer.start_as_current_span(
        name, context=_context(parent), attributes=dict(attributes or {}), links=linked
    ) as it:
        yield Span(it)


class Span:
    """A running span, or nothing while tracing is off."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def set(self, **attributes: Any) -> None:
        """Add facts that are known only now."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def fail(self, reason: str, message: str) -> None:
        """Mark the span as failed without raising."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, message))
            self._span.set_attribute("slipway.reason", reason)

    @property
    def traceparent(self) -> str:
        """This span as a parent for others; empty while tracing is off."""
        return _traceparent(self._span.get_span_context()) if self._span is not None else ""


def current_traceparent() -> str:
    """The current span as a parent for others; empty without one."""
    if _provider is None:
        return ""
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    return _traceparent(context) if context.is_valid else ""


def current_trace_id() -> str:
    """The current trace as 32 hexadecimal digits; empty without one."""
    return current_traceparent()[3:35]


def _exporter(settings: Settings) -> SpanExporter:
    if settings.tracing == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr, formatter=lambda finished: finished.to_json(indent=None) + "\n")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    insecure = not settings.otlp_endpoint.startswith("https://")
    return OTLPSpanExporter(endpoint=settings.otlp_endpoint, insecure=insecure, timeout=_FLUSH_MILLISECONDS / 1000)


def _traceparent(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _span_context(traceparent: str) -> Any:
    from opentelemetry import trace

    parts = traceparent.split("-")
    if len(parts) != 4:
        return None
    try:
        return trace.SpanContext(
            trace_id=int(parts[1], 16),
            span_id=int(parts[2], 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(int(parts[3], 16)),
        )
    except ValueError:
        return None


def _context(parent: str) -> Any:
    from opentelemetry import trace

    context = _span_context(parent) if parent else None
    return trace.set_span_in_context(trace.NonRecordingSpan(context)) if context is not None else None
