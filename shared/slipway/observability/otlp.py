"""The sender of telemetry: the names it appears under, and its exporter of spans."""

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
    from opentelemetry.sdk.trace.export import SpanExporter

    from slipway.settings import Settings

SEND_SECONDS = 3.0
"""Longest time for one request to a collector, and for sending the rest at the end."""


def resource_attributes(service: str) -> dict[str, str]:
    """Return the attributes of this process. Those in the environment come before our names.

    Args:
        service: Name of the service.
    """
    return {
        "service.name": service,
        "service.version": own_version(),
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
        **_environment_attributes(os.environ),
    }


def span_exporter(settings: Settings) -> SpanExporter:
    """Return the exporter of spans that the settings name. It reads headers, files and its other variables itself.

    Raises:
        ConfigurationError: The address of the collector, or a variable of OpenTelemetry, cannot be used.
    """
    if settings.tracing == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(
            out=sys.stderr, formatter=lambda finished: escaped_json(redact(finished.to_json(indent=None))) + "\n"
        )
    from slipway.observability.collector import read_connection  # not needed while tracing is off, as in most processes

    connection = read_connection(settings, "traces", os.environ)
    with _translate_errors(connection.endpoint):
        if connection.protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            return HttpExporter(
                endpoint=connection.endpoint, timeout=SEND_SECONDS, compression=HttpCompression(connection.compression)
            )
        from grpc import Compression
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(
            endpoint=connection.endpoint,
            insecure=connection.tls is None,
            timeout=SEND_SECONDS,
            compression=Compression.Gzip if connection.compression == "gzip" else Compression.NoCompression,
        )


@contextlib.contextmanager
def _translate_errors(endpoint: str) -> Iterator[None]:
    """Translate what an exporter raises when it reads variables that only it knows.

    Raises:
        ConfigurationError: instead.
    """
    try:
        yield
    except (ValueError, KeyError, RuntimeError, ImportError, OSError) as error:
        raise ConfigurationError(
            f"nothing can be sent to the collector at {redact_address(endpoint)}: {type(error).__name__}: {error}",
            remedy="check the variables OTEL_EXPORTER_OTLP_… and OTEL_PYTHON_EXPORTER_OTLP_…",
            about={"key": "OTEL_EXPORTER_OTLP_ENDPOINT"},
        ) from error


def _environment_attributes(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes in ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME``; the second wins."""
    pairs = (pair.partition("=") for pair in environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    given = {name.strip(): unquote(value.strip()) for name, equals, value in pairs if equals and name.strip()}
    name = environment.get("OTEL_SERVICE_NAME", "").strip()
    return given | ({"service.name": name} if name else {})
