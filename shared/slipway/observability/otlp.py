"""The sender of telemetry: the names it appears under, and its connection to an OpenTelemetry collector.

TLS, authorities, client certificates, headers and compression come from OpenTelemetry's own variables, which its exporters read
themselves: ``OTEL_EXPORTER_OTLP_CERTIFICATE``, ``OTEL_EXPORTER_OTLP_HEADERS`` and the others of that kind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

from slipway.distribution import own_version
from slipway.errors import ConfigurationError
from slipway.texts import escaped_json, redact, redact_address

if TYPE_CHECKING:
    from opentelemetry.sdk._logs.export import LogRecordExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

    from slipway.settings import Settings

SEND_SECONDS = 3.0
"""Longest time for one request to a collector, and for sending the rest at the end."""


def own_resource(service: str) -> Resource:
    """Return the resource of this process. Attributes in the environment come before our names.

    Args:
        service: Name of the service.
    """
    from opentelemetry.sdk.resources import Resource

    return Resource(  # not the default one, which runs detectors
        {
            "service.name": service,
            "service.version": own_version(),
            "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
            **_environment_attributes(os.environ),
        }
    )


def span_exporter(settings: Settings) -> SpanExporter:
    """Return the exporter of spans that the settings name.

    Raises:
        ConfigurationError: The address of the collector, or a variable of OpenTelemetry, is malformed.
    """
    if settings.tracing == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(
            out=sys.stderr, formatter=lambda finished: escaped_json(redact(finished.to_json(indent=None))) + "\n"
        )
    with _translate_errors(settings):
        if settings.otlp_protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            return HttpExporter(endpoint=_http_address(settings, "traces"), timeout=SEND_SECONDS)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=settings.otlp_endpoint, insecure=_is_insecure(settings), timeout=SEND_SECONDS)


def log_exporter(settings: Settings) -> LogRecordExporter:
    """Return the exporter of log records, for the same collector as that of spans.

    Raises:
        ConfigurationError: As :func:`span_exporter`.
    """
    with _translate_errors(settings):
        if settings.otlp_protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpExporter

            return HttpExporter(endpoint=_http_address(settings, "logs"), timeout=SEND_SECONDS)
        from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter

        return OTLPLogExporter(endpoint=settings.otlp_endpoint, insecure=_is_insecure(settings), timeout=SEND_SECONDS)


@contextlib.contextmanager
def _translate_errors(settings: Settings) -> Iterator[None]:
    """Translate what exporters raise when they read their settings.

    Raises:
        ConfigurationError: instead.
    """
    from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException

    try:
        yield
    except (ValueError, InvalidCompressionValueException) as error:
        raise ConfigurationError(
            f"nothing can be sent to the collector at {redact_address(settings.otlp_endpoint)}: {error}",
            remedy="check OTEL_EXPORTER_OTLP_ENDPOINT and the other variables OTEL_EXPORTER_OTLP_…",
            about={"key": "OTEL_EXPORTER_OTLP_ENDPOINT"},
        ) from error


def _http_address(settings: Settings, signal: str) -> str:
    return f"{settings.otlp_endpoint.rstrip('/')}/v1/{signal}"


def _is_insecure(settings: Settings) -> bool:
    return not settings.otlp_endpoint.startswith("https://")


def _environment_attributes(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes in ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME``; the second wins."""
    pairs = (pair.partition("=") for pair in environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    given = {name.strip(): unquote(value.strip()) for name, equals, value in pairs if equals and name.strip()}
    name = environment.get("OTEL_SERVICE_NAME", "").strip()
    return given | ({"service.name": name} if name else {})
