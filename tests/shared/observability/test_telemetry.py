"""Spans: free while off, one trace while on, received by a real OTLP collector."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from slipway.observability.logs import JsonFormatter, command_logs, json_handler
from slipway.observability.telemetry import (
    current_trace_id,
    current_traceparent,
    derive_span,
    is_traceparent,
    new_trace,
    record,
    span,
    tracing,
)
from slipway.settings import Settings
from slipway.texts import redact, secrets_of
from support.harness.unhurried import unhurried
from support.servers.otlp_collector import Collector, collecting, collecting_http


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    with collecting() as started:
        yield started


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


def test_spans_are_recorded_until_the_last_of_overlapping_blocks_ends(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    first, second = tracing(settings("otlp", endpoint)), tracing(settings("otlp", endpoint))
    first.__enter__()
    with span("first"):
        second.__enter__()
        first.__exit__(None, None, None)
        with span("second"):
            record("third", identity=new_trace().replace("0" * 16, "ab" * 8), parent="", start=1, end=2)
    second.__exit__(None, None, None)
    assert {found.name for found in kept.spans} == {"first", "second", "third"}
    with span("later") as later:
        assert later.traceparent == ""


def _stage(name: str, parent: str) -> str:
    with span(name, parent=parent) as it:
        it.set(bytes=3)
        return it.traceparent


def test_a_span_that_is_written_again_is_the_same_span(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    for _ in range(2):  # as two processes would
        with tracing(settings("otlp", endpoint)):
            record("attempt", identity=derive_span(parent, "merge", 1), parent=parent, start=10.5, end=11.0)
            record("other", identity=derive_span(parent, "merge", 2), parent=parent, start=10.5, end=11.0)
    assert [span.name for span in kept.spans] == ["attempt", "other"] * 2
    assert kept.spans[0] == kept.spans[2]
    assert kept.spans[0].span_id != kept.spans[1].span_id
    assert kept.spans[0].parent_span_id.hex() == "cd" * 8
    assert kept.spans[0].end_time_unix_nano - kept.spans[0].start_time_unix_nano == 500_000_000


def test_what_is_not_sampled_is_not_sent(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    parent = f"00-{'ab' * 16}-{'cd' * 8}-00"
    with tracing(settings("otlp", endpoint)):
        record("attempt", identity=derive_span(parent, "merge", 1), parent=parent, start=1, end=2)
        with span("stage merge", parent=parent):
            pass
    assert kept.spans == []


@pytest.mark.parametrize("text", ["", "00-ab-cd-01", f"00-{'0' * 32}-{'cd' * 8}-01", f"00-{'AB' * 16}-{'cd' * 8}-01"])
def test_what_is_no_trace_leads_nowhere(text: str) -> None:
    assert not is_traceparent(text)
    assert derive_span(text, "merge") == ""


def test_an_unreachable_collector_delays_the_end_by_seconds_only() -> None:
    begin = time.monotonic()
    with tracing(settings("otlp", "http://127.0.0.1:9")), span("export"):
        pass
    assert time.monotonic() - begin < unhurried(8)


def test_the_console_gets_one_json_object_per_span(capsys: pytest.CaptureFixture[str]) -> None:
    with tracing(settings("console")), span("export"):
        pass
    document = json.loads(capsys.readouterr().err)
    assert document["name"] == "export"


def test_log_lines_are_json_with_the_trace_they_belong_to(collector: tuple[Collector, str]) -> None:
    stream = io.StringIO()
    with (
        command_logs("info", json_handler(stream)),
        tracing(settings("otlp", collector[1])),
        span("export") as it,
    ):
        logging.getLogger("slipway.test").info("merged %d", 3, extra={"task": "merge"})
        logging.getLogger("slipway.test").debug("not shown")
        expected = it.traceparent.split("-")[1]
    (line,) = stream.getvalue().splitlines()
    document = json.loads(line)
    assert (document["message"], document["level"], document["task"]) == ("merged 3", "info", "merge")
    assert document["trace_id"] == expected


SERVICE = """
import logging
import subprocess
import sys
from slipway.observability.logs import configure_service_logs
from slipway.observability.telemetry import span, within
log = logging.getLogger("slipway.test")
configure_service_logs("INFO", form="json")
with within("TRACE"), span("stage merge"):
    log.info("leased")
log.info("idle")
configure_service_logs("INFO", form="text")
log.info("for people")
"""


def test_log_lines_name_the_trace_even_where_no_spans_are_recorded() -> None:
    trace = new_trace()
    done = subprocess.run([sys.executable, "-c", SERVICE.replace("TRACE", trace)], capture_output=True, text=True)
    leased, idle, text = done.stderr.splitlines()
    assert json.loads(leased)["trace_id"] == trace.split("-")[1]
    assert "trace_id" not in json.loads(idle)
    assert text.endswith("INFO slipway.test for people")


def test_secrets_are_found_by_their_names() -> None:
    environment = {
        "HF_TOKEN": "hf_0123456789",
        "AWS_SECRET_ACCESS_KEY": "abcdefgh1",
        "PATH": "/usr/bin:/bin",
        "PWD": "/home/somebody",
        "TOKEN": "x",
        "GH_PAT": "github_pat_0",
        "DEPLOY_PRIVATE_KEY": "-----BEGIN",
        "SENTRY_DSN": "https://0a1b@sentry/1",
        "MYSQL_PWD": "pwd-of-mysql",
        "SLIPWAY_STATE": "postgresql://slipway:p%40ss-word@db/slipway",
    }
    found = {
        "hf_0123456789",
        "abcdefgh1",
        "github_pat_0",
        "-----BEGIN",
        "https://0a1b@sentry/1",
        "pwd-of-mysql",
        "p@ss-word",
    }
    assert set(secrets_of(environment)) == found


def test_no_password_of_a_url_is_written() -> None:
    assert redact("cannot reach postgresql://slipway:x@db:5432/slipway") == (
        "cannot reach postgresql://slipway:***@db:5432/slipway"
    )
    assert redact("no folder https:/somebody:x@h/y") == "no folder https:/somebody:***@h/y"  # as a path
    assert redact("https://host:8080/a@b and s3://bucket/a") == "https://host:8080/a@b and s3://bucket/a"


def test_secrets_never_reach_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from slipway import texts

    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    texts._secrets.cache_clear()
    try:
        record = logging.makeLogRecord({"msg": f"reading {tmp_path} with hf_very_secret", "levelname": "INFO"})
        assert "hf_very_secret" not in JsonFormatter().format(record)
    finally:
        texts._secrets.cache_clear()


def test_the_environment_names_the_service_and_its_attributes(
    collector: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, endpoint = collector
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=unused, team=red%20team,broken")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "exports")
    with tracing(settings("otlp", endpoint), service="slipway-worker"), span("stage merge", kind="consumer"):
        pass
    assert kept.senders == ["exports"]
    assert kept.resources[0]["team"] == "red team"
    assert kept.spans[0].kind == trace_pb2.Span.SPAN_KIND_CONSUMER


def test_spans_travel_over_http() -> None:
    with collecting_http() as (kept, endpoint):
        named = {"SLIPWAY_HOME": "/nowhere", "SLIPWAY_TRACING": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        over_http = Settings.from_environment({**named, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
        assert Settings.from_environment(named).otlp_endpoint == "http://localhost:4318"
        with tracing(over_http), span("export", kind="client"):
            pass
    assert [span.name for span in kept.spans] == ["export"]
