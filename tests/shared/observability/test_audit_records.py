"""The audit log at a real OTLP collector: what is sent, what is dropped, and that no call notices either."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from opentelemetry.proto.logs.v1 import logs_pb2

from slipway import texts
from slipway.errors import ConfigurationError
from slipway.observability import metrics
from slipway.observability.audit_records import AuditRecord, Patience, Sender, sending_audit
from slipway.observability.telemetry import derive_span, new_trace, tracing
from slipway.security.access import audit
from slipway.settings import Settings
from support.coordinators.harness import wait_for
from support.harness.unhurried import unhurried
from support.servers.certificates import Authority
from support.servers.metrics_page import page
from support.servers.otlp_collector import Collector, collecting, collecting_http, facts

QUICK = Patience(gather_seconds=0.01, pauses=(0.01,), keep_seconds=0.1, end_seconds=2.0)
HOSTILE = 'x" outcome="done\n\x1b[2J\u202e\u2028\x85 {"audit": "\ud800'


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    with collecting() as started:
        yield started


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    """Write the log at every level, as a service does."""
    logger = logging.getLogger("slipway.audit")
    before = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(before)
    assert logger.handlers == []


def settings(endpoint: str, *, protocol: str = "grpc", audit: str = "otlp") -> Settings:
    return Settings.from_environment(
        {
            "SLIPWAY_HOME": "/nowhere",
            "SLIPWAY_AUDIT": audit,
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        }
    )


def write(number: int = 0, *, traceparent: str = "") -> None:
    audit.write(
        "CancelExport",
        outcome="PERMISSION_DENIED",
        principal="ci",
        resource=f"projects/red/exports/e-{number}",
        peer="ipv6:[::1]:99",
        issuer="https://issuer.example.org",
        subject="repo:red",
        traceparent=traceparent,
    )


def dropped(port: int) -> dict[str, float]:
    counts = {labels[0][1]: value for (name, labels), value in page(port).items() if name == metrics.AUDIT_RECORDS.name}
    assert set(counts) == {"sent", "queue_full", "not_taken", "ended"}
    return {outcome: count for outcome, count in counts.items() if count}


def check(record: logs_pb2.LogRecord, trace: str) -> None:
    assert (record.event_name, record.severity_text) == ("slipway.audit", "INFO")
    assert record.severity_number == logs_pb2.SEVERITY_NUMBER_INFO
    assert abs(record.time_unix_nano / 1e9 - time.time()) < 600
    assert record.trace_id.hex() == trace.split("-")[1]
    assert record.body.string_value.startswith('action="CancelExport" outcome="PERMISSION_DENIED" principal="ci"')
    assert facts(record.attributes) == {
        "slipway.audit.action": "CancelExport",
        "slipway.audit.outcome": "PERMISSION_DENIED",
        "error.type": "PERMISSION_DENIED",
        "user.name": "ci",
        "user.id": "repo:red",
        "slipway.audit.issuer": "https://issuer.example.org",
        "slipway.project": "red",
        "slipway.resource": "projects/red/exports/e-0",
        "network.peer.address": "::1",
        "network.peer.port": 99,
    }


def test_records_travel_over_grpc(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    span = derive_span(new_trace(), "a call")
    with metrics.serving("127.0.0.1:0") as port:
        with sending_audit(settings(endpoint), service="slipway-coordinator"):
            write(traceparent=span)
        write()  # after the block
        assert dropped(port) == {"sent": 1}
    (record,) = kept.logs
    check(record, span)
    assert (record.span_id.hex(), record.flags) == (span.split("-")[2], 1)
    assert kept.log_senders[0]["service.name"] == "slipway-coordinator"


def test_records_travel_over_http() -> None:
    trace = new_trace()
    with (
        collecting_http() as (kept, endpoint),
        sending_audit(settings(endpoint, protocol="http/protobuf"), service="slipway-worker", patience=QUICK),
    ):
        write(traceparent=trace)
        wait_for(lambda: kept.logs)
    (record,) = kept.logs
    check(record, trace)
    assert record.span_id == b"", "of a trace without a span"


def test_the_connection_has_the_tls_and_headers_of_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    files = authority.files("collector", "127.0.0.1")
    credentials = grpc.ssl_server_credentials([(files.key.read_bytes(), files.certificate.read_bytes())])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.ca))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20of-the-collector")
    with (
        collecting(credentials) as (kept, endpoint),
        sending_audit(settings(endpoint), service="slipway-coordinator", patience=QUICK),
    ):
        write()
        wait_for(lambda: kept.logs)
    assert len(kept.logs) == 1
    assert kept.log_metadata[0]["authorization"] == "Bearer of-the-collector"


def test_off_means_that_nothing_is_sent(collector: tuple[Collector, str]) -> None:
    with sending_audit(settings(collector[1], audit=""), service="slipway-coordinator"):
        write()
        assert logging.getLogger("slipway.audit").handlers == []
    assert collector[0].log_metadata == []


def test_what_is_unknown_has_no_attribute_and_no_trace(collector: tuple[Collector, str]) -> None:
    with sending_audit(settings(collector[1]), service="slipway-coordinator"):
        audit.write("DeleteExport", outcome=audit.DONE, principal="", resource="")
        audit.write("Run", outcome=audit.STARTED, principal="", resource="", peer="unix:")
    forgotten, run = collector[0].logs
    assert facts(forgotten.attributes) == {"slipway.audit.action": "DeleteExport", "slipway.audit.outcome": "done"}
    assert (forgotten.trace_id, forgotten.span_id, forgotten.flags) == (b"", b"", 0)
    assert facts(run.attributes)["network.peer.address"] == "unix:"


def test_hostile_text_and_secrets_are_cleaned(
    collector: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    texts._secrets.cache_clear()
    try:
        with sending_audit(settings(collector[1]), service="slipway-coordinator"):
            resource = f"projects/{HOSTILE}/{'x' * 10_000}"
            audit.write("Run", outcome=audit.DONE, principal="hf_very_secret", resource=resource, peer=HOSTILE)
    finally:
        texts._secrets.cache_clear()
    (record,) = collector[0].logs
    shown = [record.body.string_value, *map(str, facts(record.attributes).values())]
    assert all(text.isprintable() for text in shown)
    assert "hf_very_secret" not in "".join(shown)
    assert max(map(len, shown)) < 2500
    assert "error.type" not in facts(record.attributes)


def refuse(context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not now")
    raise AssertionError


def test_records_are_sent_again_until_they_are_taken(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    patience = Patience(gather_seconds=0.01, pauses=(0.01,), keep_seconds=60)
    kept.on_logs = refuse
    with metrics.serving("127.0.0.1:0") as port:
        with sending_audit(settings(endpoint), service="slipway-coordinator", patience=patience):
            write()
            wait_for(lambda: len(kept.log_metadata) >= 3)
            kept.on_logs = lambda context: None
            write(1)
            wait_for(lambda: len(kept.logs) == 2)
        assert dropped(port) == {"sent": 2}
    resources = [facts(record.attributes)["slipway.resource"] for record in kept.logs]
    assert resources == ["projects/red/exports/e-0", "projects/red/exports/e-1"]


def test_what_is_never_taken_does_not_hold_up_what_follows(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    kept.on_logs = refuse
    with metrics.serving("127.0.0.1:0") as port:
        with sending_audit(settings(endpoint), service="slipway-coordinator", patience=QUICK):
            write()
            wait_for(lambda: dropped(port) == {"not_taken": 1})
            kept.on_logs = lambda context: None
            write(1)
        assert dropped(port) == {"not_taken": 1, "sent": 1}


def test_a_full_queue_drops_the_newest_records_and_delays_nobody(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    may_answer = threading.Event()
    kept.on_logs = lambda context: may_answer.wait(60)
    patience = Patience(most=4, batch=2, gather_seconds=0.01)
    with metrics.serving("127.0.0.1:0") as port:
        with sending_audit(settings(endpoint), service="slipway-coordinator", patience=patience):
            write(0)
            wait_for(lambda: kept.log_metadata)  # the thread waits for its answer
            began = time.monotonic()
            for number in range(1, 101):
                write(number)
            assert time.monotonic() - began < unhurried(0.5)
            may_answer.set()
        assert dropped(port) == {"sent": 5, "queue_full": 96}
    assert [facts(record.attributes)["slipway.resource"].rpartition("-")[2] for record in kept.logs] == list("01234")


def test_a_collector_that_is_not_there_fails_no_call_and_does_not_delay_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    patience = Patience(batch=2, gather_seconds=0.01, end_seconds=0.2)
    with metrics.serving("127.0.0.1:0") as port:
        began = time.monotonic()
        with sending_audit(settings("http://127.0.0.1:9"), service="slipway-coordinator", patience=patience):
            for number in range(5):
                write(number)
        assert time.monotonic() - began < unhurried(4)
        assert dropped(port) == {"ended": 5}
    assert "of the audit log did not reach the collector" in caplog.text


@pytest.mark.parametrize("endpoint", ["nonsense", "http://[::1", "https://", "http://a b:1"])
def test_an_impossible_address_fails_no_call(endpoint: str) -> None:
    patience = Patience(gather_seconds=0.01, pauses=(0.01,), keep_seconds=0.0, end_seconds=0.1)
    over_http = settings(endpoint, protocol="http/protobuf")
    with sending_audit(over_http, service="slipway-coordinator", patience=patience):
        write()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
    ],
)
def test_variables_that_cannot_be_used_are_an_error_at_the_start(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    given = settings(value if name.endswith("ENDPOINT") else "http://127.0.0.1:9")
    for sending in (
        sending_audit(given, service="slipway-coordinator"),
        tracing(given.model_copy(update={"tracing": "otlp"})),
    ):
        with pytest.raises(ConfigurationError, match="nothing can be sent to the collector") as caught, sending:
            pass
        assert "OTEL_EXPORTER_OTLP_" in caught.value.remedy


def test_an_exporter_that_raises_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[AuditRecord] = []

    def export(batch: Sequence[AuditRecord]) -> bool:
        if not caplog.records:
            raise RuntimeError("not yet")
        sent.extend(batch)
        return True

    sender = Sender(export, QUICK)
    sender.put(AuditRecord(0.0, "one", {}, ""))
    wait_for(lambda: sent)
    sender.end(abort=lambda: None)
    assert [record.message for record in sent] == ["one"]
    assert "records of the audit log could not be sent: RuntimeError: not yet" in caplog.text
