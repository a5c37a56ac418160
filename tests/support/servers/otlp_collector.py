"""A real OTLP collector in this process: a server of gRPC, or of HTTP, that keeps the spans and log records that it receives."""

from __future__ import annotations

import gzip
import ssl
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import grpc
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the received spans and log records, and their senders.

    Attributes:
        on_logs: Called with each request of log records over gRPC before they are kept; may end the call.
        log_status: HTTP status of the response to log records; those of another status than 200 are not kept.
        rejected: How many of each request's log records it says that it did not take.
    """

    def __init__(self) -> None:
        self.spans: list[trace_pb2.Span] = []
        self.senders: list[str] = []
        self.resources: list[dict[str, object]] = []
        self.logs: list[logs_pb2.LogRecord] = []
        self.log_senders: list[dict[str, object]] = []
        self.log_metadata: list[dict[str, Any]] = []
        self.on_logs: Callable[[grpc.ServicerContext], object] = lambda context: None
        self.log_status = 200
        self.rejected = 0

    def Export(  # noqa: N802 - the service's own name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Receive spans."""
        return self.keep(request)

    def keep(
        self, request: trace_service_pb2.ExportTraceServiceRequest
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep the spans of a request."""
        for resource in request.resource_spans:
            self.resources.append(facts(resource.resource.attributes))
            sender = self.resources[-1]["service.name"]
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
                self.senders.extend(str(sender) for _ in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def keep_logs(
        self, request: logs_service_pb2.ExportLogsServiceRequest
    ) -> logs_service_pb2.ExportLogsServiceResponse:
        """Keep the log records of a request."""
        for resource in request.resource_logs:
            self.log_senders.append(facts(resource.resource.attributes))
            for scope in resource.scope_logs:
                self.logs.extend(scope.log_records)
        partial = logs_service_pb2.ExportLogsPartialSuccess(rejected_log_records=self.rejected, error_message="too old")
        return logs_service_pb2.ExportLogsServiceResponse(partial_success=partial if self.rejected else None)

    def named(self, name: str) -> list[trace_pb2.Span]:
        """Return the spans of this name, each once, in order of their start."""
        named = {span.span_id: span for span in list(self.spans) if span.name == name}
        return sorted(named.values(), key=lambda span: span.start_time_unix_nano)

    def one(self, name: str) -> trace_pb2.Span:
        """Return the only span of this name."""
        (span,) = self.named(name)
        return span


class Logs(logs_service_pb2_grpc.LogsServiceServicer):
    """The collector's service for log records."""

    def __init__(self, kept: Collector) -> None:
        self._kept = kept

    def Export(  # noqa: N802 - the service's own name
        self, request: logs_service_pb2.ExportLogsServiceRequest, context: grpc.ServicerContext
    ) -> logs_service_pb2.ExportLogsServiceResponse:
        """Receive log records."""
        self._kept.log_metadata.append(dict(context.invocation_metadata()))
        self._kept.on_logs(context)
        return self._kept.keep_logs(request)


def facts(attributes: object) -> dict[str, object]:
    """Return the attributes as a dict."""
    values: dict[str, object] = {}
    for attribute in attributes:  # type: ignore[attr-defined]
        assert isinstance(attribute, common_pb2.KeyValue)
        values[attribute.key] = getattr(attribute.value, attribute.value.WhichOneof("value"))
    return values


@contextmanager
def collecting(credentials: grpc.ServerCredentials | None = None) -> Iterator[tuple[Collector, str]]:
    """Run a collector until the block ends, with TLS if it has credentials; yield it with its address."""
    kept = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(Logs(kept), server)
    if credentials is None:
        scheme, port = "http", server.add_insecure_port("127.0.0.1:0")
    else:
        scheme, port = "https", server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield kept, f"{scheme}://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextmanager
def collecting_http(tls: ssl.SSLContext | None = None) -> Iterator[tuple[Collector, str]]:
    """Run a collector of OTLP over HTTP until the block ends, with TLS if it has a context; yield it with its address."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            decompress = {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(self.headers["Content-Encoding"])
            body = body if decompress is None else decompress(body)
            answer: Message | None = None
            if self.path == "/v1/logs":
                kept.log_metadata.append({name.lower(): value for name, value in self.headers.items()})
            if self.path == "/v1/logs" and kept.log_status != 200:
                self.send_response(kept.log_status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                return
            if self.path == "/v1/traces":
                answer = kept.keep(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/logs":
                answer = kept.keep_logs(logs_service_pb2.ExportLogsServiceRequest.FromString(body))
            self.send_response(200 if answer is not None else 404)
            self.end_headers()
            self.wfile.write(answer.SerializeToString() if answer is not None else b"")

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield kept, f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
