"""What a collector says to a request, over both protocols, and that the sender follows it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs

from slipway.observability.collector import read_connection
from slipway.observability.log_collector import Answer, LogCollector, Verdict, open_log_collector
from slipway.settings import Settings
from support.servers.certificates import Authority
from support.servers.otlp_collector import Collector, collecting, collecting_http

REQUEST = ExportLogsServiceRequest(
    resource_logs=[ResourceLogs(scope_logs=[ScopeLogs(log_records=[LogRecord(event_name="one")])])]
)


@contextmanager
def connected(endpoint: str, protocol: str, **variables: str) -> Iterator[LogCollector]:
    environment = {
        "SLIPWAY_HOME": "/nowhere",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        **{f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()},
    }
    collector = open_log_collector(read_connection(Settings.from_environment(environment), "logs", environment))
    try:
        yield collector
    finally:
        collector.close()


@pytest.fixture(scope="module")
def over_grpc() -> Iterator[tuple[Collector, LogCollector]]:
    with collecting() as (kept, endpoint), connected(endpoint, "grpc") as collector:
        yield kept, collector


@pytest.fixture(scope="module")
def over_http() -> Iterator[tuple[Collector, LogCollector]]:
    with collecting_http() as (kept, endpoint), connected(endpoint, "http/protobuf") as collector:
        yield kept, collector


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (grpc.StatusCode.UNAVAILABLE, Verdict.LATER),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Verdict.LATER),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Verdict.DIVIDE),
        (grpc.StatusCode.INVALID_ARGUMENT, Verdict.DIVIDE),
        (grpc.StatusCode.UNIMPLEMENTED, Verdict.REFUSED),
        (grpc.StatusCode.UNAUTHENTICATED, Verdict.REFUSED),
        (grpc.StatusCode.UNKNOWN, Verdict.REFUSED),
    ],
)
def test_codes_say_whether_a_request_may_be_repeated(
    over_grpc: tuple[Collector, LogCollector], code: grpc.StatusCode, verdict: Verdict
) -> None:
    kept, collector = over_grpc
    kept.on_logs = lambda context: context.abort(code, "not\nnow")
    assert collector.send(REQUEST) == Answer(verdict, problem=f"{code.name}: not now")


def test_a_collector_may_ask_to_repeat_a_request_that_exhausts_it(over_grpc: tuple[Collector, LogCollector]) -> None:
    kept, collector = over_grpc
    status = status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    status.details.add().Pack(error_details_pb2.RetryInfo())

    def exhausted(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "slower")

    kept.on_logs = exhausted
    assert collector.send(REQUEST).verdict is Verdict.LATER


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (302, Verdict.REFUSED),
        (400, Verdict.DIVIDE),
        (401, Verdict.REFUSED),
        (404, Verdict.REFUSED),
        (413, Verdict.DIVIDE),
        (429, Verdict.LATER),
        (500, Verdict.REFUSED),
        (503, Verdict.LATER),
    ],
)
def test_statuses_say_whether_a_request_may_be_repeated(
    over_http: tuple[Collector, LogCollector], status: int, verdict: Verdict
) -> None:
    kept, collector = over_http
    kept.log_status = status
    assert collector.send(REQUEST) == Answer(verdict, problem=f"status {status}")


@pytest.mark.parametrize("rejected", [0, 1])
def test_a_response_may_say_that_records_were_not_taken(
    over_grpc: tuple[Collector, LogCollector], over_http: tuple[Collector, LogCollector], rejected: int
) -> None:
    for kept, collector in (over_grpc, over_http):
        kept.on_logs, kept.log_status, kept.rejected = lambda context: None, 200, rejected
        assert collector.send(REQUEST) == Answer(Verdict.TAKEN, rejected, "too old" if rejected else "")


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_not_there_may_come_later(protocol: str) -> None:
    with connected("http://127.0.0.1:9", protocol) as collector:
        answer = collector.send(REQUEST)
    assert answer.verdict is Verdict.LATER
    assert answer.problem


@pytest.mark.parametrize("compression", ["none", "gzip", "deflate"])
def test_requests_are_compressed_over_http(compression: str) -> None:
    with (
        collecting_http() as (kept, endpoint),
        connected(endpoint, "http/protobuf", COMPRESSION=compression, HEADERS="authorization=Bearer%20us") as collector,
    ):
        assert collector.send(REQUEST).verdict is Verdict.TAKEN
    (headers,) = kept.log_metadata
    assert headers.get("content-encoding", "none") == compression
    assert (headers["content-type"], headers["authorization"]) == ("application/x-protobuf", "Bearer us")
    assert [record.event_name for record in kept.logs] == ["one"]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_both_sides_show_certificates(protocol: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, client = authority.files("collector", "127.0.0.1"), authority.files("worker")
    own = {"CLIENT_CERTIFICATE": str(client.certificate), "CLIENT_KEY": str(client.key)}
    if protocol == "grpc":
        pair = (server.key.read_bytes(), server.certificate.read_bytes())
        place = collecting(grpc.ssl_server_credentials([pair], authority.ca.read_bytes(), require_client_auth=True))
    else:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
        tls.verify_mode = ssl.CERT_REQUIRED
        tls.load_cert_chain(server.certificate, server.key)
        place = collecting_http(tls)
    with place as (kept, endpoint):
        for variables, expected in (
            ({**own, "CERTIFICATE": str(authority.ca)}, Verdict.TAKEN),
            ({"CERTIFICATE": str(authority.ca)}, Verdict.LATER),  # without one of ours
            (own, Verdict.LATER),  # of an authority that the system does not know
        ):
            with connected(endpoint, protocol, **variables) as collector:
                assert collector.send(REQUEST).verdict is expected
    assert len(kept.logs) == 1
