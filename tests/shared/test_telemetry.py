"""Spans: free while off, one trace while on, received by a real OTLP collector."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from slipway.logs import JsonFormatter, configure_logs, secrets_of
from slipway.settings import Settings
from slipway.telemetry import current_trace_id, current_traceparent, span, tracing


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans it is sent."""

    def __init__(self) -> None:
        self.spans: list[trace_pb2.Span] = []

    def Export(  # noqa: N802 - the service's own name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    kept = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


def settings(tracing: str, endpoint: str = "") -> Settings:
    return Settings.from_environment(
        {"SLIPWAY_HOME": "/nowhere", "SLIPWAY_TRACING": tracing, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    )


def test_off_means_no_trace() -> None:
    with tracing(settings("")), span("export") as outer:
        assert (outer.traceparent, current_traceparent(), current_trace_id()) == ("", "", "")


def test_stages_join_the_export_s_trace_from_anywhere(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    with tracing(settings("otlp", endpoint)):
        with span("export", attributes={"slipway.checkpoint": "run"}) as export:
            parent = export.traceparent
            assert current_trace_id() == parent.split("-")[1]
        with ThreadPoolExecutor(1) as elsewhere:  # a thread that has no current span
            first = elsewhere.submit(_stage, "stage merge", parent).result()
        with span("stage merge", parent=parent, links=(first,)) as again:
            again.fail("OUT_OF_MEMORY", "too large")
    spans = {(found.name, len(found.links)): found for found in kept.spans}
    assert set(spans) == {("export", 0), ("stage merge", 0), ("stage merge", 1)}
    assert len({found.trace_id for found in kept.spans}) == 1
    root = spans["export", 0]
    assert {found.parent_span_id for key, found in spans.items() if key[0] != "export"} == {root.span_id}
    failed = spans["stage merge", 1]
    assert failed.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert failed.links[0].span_id == spans["stage merge", 0].span_id
    assert current_trace_id() == ""


def _stage(name: str, parent: str) -> str:
    with span(name, parent=parent) as it:
        it.set(bytes=3)
        return it.traceparent


def test_an_unreachable_collector_delays_the_end_by_seconds_only() -> None:
    import time

    begin = time.monotonic()
    with tracing(settings("otlp", "http://127.0.0.1:9")), span("export"):
        pass
    assert time.monotonic() - begin < 8


def test_the_console_gets_one_json_object_per_span(capsys: pytest.CaptureFixture[str]) -> None:
    with tracing(settings("console")), span("export"):
        pass
    document = json.loads(capsys.readouterr().err)
    assert document["name"] == "export"


def test_log_lines_are_json_with_the_trace_they_belong_to(collector: tuple[Collector, str]) -> None:
    stream = io.StringIO()
    configure_logs("info", stream=stream)
    try:
        with tracing(settings("otlp", collector[1])), span("export") as it:
            logging.getLogger("slipway.test").info("merged %d", 3, extra={"task": "merge"})
            logging.getLogger("slipway.test").debug("not shown")
            expected = it.traceparent.split("-")[1]
    finally:
        logging.getLogger("slipway").handlers.clear()
    (line,) = stream.getvalue().splitlines()
    document = json.loads(line)
    assert (document["message"], document["level"], document["task"]) == ("merged 3", "info", "merge")
    assert document["trace_id"] == expected


def test_secrets_are_found_by_their_names() -> None:
    environment = {
        "HF_TOKEN": "hf_0123456789",
        "AWS_SECRET_ACCESS_KEY": "abcdefgh1",
        "PATH": "/usr/bin:/bin",
        "TOKEN": "x",
    }
    assert secrets_of(environment) == ("hf_0123456789", "abcdefgh1")


def test_secrets_never_reach_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from slipway import logs

    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    logs._secrets.cache_clear()
    try:
        record = logging.makeLogRecord({"msg": f"reading {tmp_path} with hf_very_secret", "levelname": "INFO"})
        assert "hf_very_secret" not in JsonFormatter().format(record)
    finally:
        logs._secrets.cache_clear()
