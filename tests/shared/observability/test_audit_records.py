"""The audit log at a real OTLP collector: what is sent, what is dropped, and that no call notices either."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from opentelemetry.proto.logs.v1 import logs_pb2

from slipway import texts
from slipway.observability import metrics
from slipway.observability.audit_facts import DONE, STARTED, AuditFacts
from slipway.observability.audit_records import AuditRecord, Patience, Sender, sending_audit
from slipway.observability.log_collector import Answer, Verdict
from slipway.observability.telemetry import derive_span, new_trace
from slipway.security.access import audit
from slipway.settings import Settings
from support.coordinators.harness import wait_for
from support.harness.unhurried import unhurried
from support.servers.certificates import Authority
from support.servers.metrics_page import page
from support.servers.otlp_collector import Collector, collecting, collecting_http, facts

QUICK = Patience(gather_seconds=0.01, pauses=(0.01,), end_seconds=60)
FACTS = AuditFacts(action="Run", outcome=DONE, principal="ci", project="", resource="")
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


def resources(kept: Collector) -> list[str]:
    """Return the numbers of the records that were written by :func:`write`."""
    return [str(facts(record.attributes)["slipway.resource"]).rpartition("-")[2] for record in kept.logs]


def write(number: int = 0, *, principal: str = "ci", traceparent: str = "") -> None:
    audit.write(
        "CancelExport",
        outcome="PERMISSION_DENIED",
        principal=principal,
        resource=f"projects/red/exports/e-{number}",
        peer="ipv6:[::1]:99",
        issuer="https://issuer.example.org",
        subject="repo:red",
        traceparent=traceparent,
    )


def outcomes(port: int) -> dict[str, float]:
    counts = {labels[0][1]: value for (name, labels), value in page(port).items() if name == metrics.AUDIT_RECORDS.name}
    assert set(counts) == {"sent", "queue_full", "refused"}
    return {outcome: count for outcome, count in counts.items() if count}


def check(record: logs_pb2.LogRecord, trace: str) -> None:
    assert (record.event_name, record.severity_text) == ("slipway.audit", "INFO")
    assert record.severity_number == logs_pb2.SEVERITY_NUMBER_INFO
    assert abs(record.time_unix_nano / 1e9 - time.time()) < 600
    assert record.trace_id.hex() == trace.split("-")[1]
    assert record.body.string_value.startswith('action="CancelExport" outcome="PERMISSION_DENIED" principal="ci"')
    shown = facts(record.attributes)
    assert uuid.UUID(str(shown.pop("log.record.uid"))).version == 4
    assert shown == {
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
        with sending_audit(settings(endpoint), service="slipway-coordinator", patience=QUICK):
            write(traceparent=span)
        write()  # after the block
        assert outcomes(port) == {"sent": 1}
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
    with sending_audit(settings(collector[1]), service="slipway-coordinator", patience=QUICK):
        audit.write("DeleteExport", outcome=DONE, principal="", resource="")
        audit.write("Run", outcome=STARTED, principal="", resource="", peer="unix:")
    forgotten, run = collector[0].logs
    assert set(facts(forgotten.attributes)) == {"slipway.audit.action", "slipway.audit.outcome", "log.record.uid"}
    assert (forgotten.trace_id, forgotten.span_id, forgotten.flags) == (b"", b"", 0)
    assert facts(run.attributes)["network.peer.address"] == "unix:"


def test_hostile_text_and_secrets_are_cleaned(
    collector: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    texts._secrets.cache_clear()
    try:
        with sending_audit(settings(collector[1]), service="slipway-coordinator", patience=QUICK):
            resource = f"projects/{HOSTILE}/{'x' * 10_000}"
            audit.write("Run", outcome=DONE, principal="hf_very_secret", resource=resource, peer=HOSTILE)
            audit.write("Run", outcome=DONE, principal="", resource="", peer="hf_very_secret")
    finally:
        texts._secrets.cache_clear()
    assert len(collector[0].logs) == 2
    for record in collector[0].logs:
        shown = [record.body.string_value, *map(str, facts(record.attributes).values())]
        assert all(text.isprintable() for text in shown)
        assert "hf_very_secret" not in "".join(shown)
        assert max(map(len, shown)) < 2500
        assert "error.type" not in facts(record.attributes)


def refuse(context: grpc.ServicerContext, code: grpc.StatusCode) -> NoReturn:
    context.abort(code, "not now")
    raise AssertionError


def test_records_are_sent_again_until_the_collector_works(
    collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture
) -> None:
    kept, endpoint = collector
    caplog.set_level(logging.INFO, "slipway.observability")
    kept.on_logs = lambda context: refuse(context, grpc.StatusCode.UNAVAILABLE)
    with (
        metrics.serving("127.0.0.1:0") as port,
        sending_audit(settings(endpoint), service="slipway-coordinator", patience=QUICK),
    ):
        write()
        wait_for(lambda: len(kept.log_metadata) >= 3)
        assert page(port)["slipway_audit_oldest_seconds", ()] > 0
        assert outcomes(port) == {}
        kept.on_logs = lambda context: None
        write(1)
        wait_for(lambda: outcomes(port) == {"sent": 2})
        wait_for(lambda: page(port)["slipway_audit_oldest_seconds", ()] == 0)
    assert resources(kept) == ["0", "1"]
    messages = [record.getMessage() for record in caplog.records if record.name == "slipway.observability"]
    assert messages == [
        "the audit log does not reach the collector, and is sent again: UNAVAILABLE: not now",
        "the audit log reaches the collector again",
    ]


def test_a_record_that_is_sent_twice_has_the_same_id() -> None:
    sent: list[AuditRecord] = []

    def send(batch: Sequence[AuditRecord]) -> Answer:
        sent.extend(batch)
        return Answer(Verdict.LATER if len(sent) < 3 else Verdict.TAKEN)

    sender = Sender(send, QUICK)
    sender.put(AuditRecord(0.0, "one", FACTS, ""))
    wait_for(lambda: len(sent) == 3)
    sender.end(abort=lambda: None)
    assert len({record.uid for record in sent}) == 1


def test_what_is_refused_is_dropped_at_once_and_holds_up_nothing(
    collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture
) -> None:
    kept, endpoint = collector
    kept.on_logs = lambda context: refuse(context, grpc.StatusCode.UNIMPLEMENTED)
    with metrics.serving("127.0.0.1:0") as port:
        patience = Patience(batch=8, gather_seconds=60, end_seconds=60)
        with sending_audit(settings(endpoint), service="slipway-coordinator", patience=patience):
            for number in range(8):
                write(number)
            wait_for(lambda: outcomes(port) == {"refused": 8})
            assert len(kept.log_metadata) == 1, "it is not repeated, and not divided"
            kept.on_logs = lambda context: None
            write(8)
        assert outcomes(port) == {"refused": 8, "sent": 1}
    assert "8 records of the audit log did not reach the collector: UNIMPLEMENTED: not now" in caplog.text


@pytest.mark.parametrize("raises", [False, True])
def test_a_record_that_is_at_fault_is_dropped_alone(raises: bool) -> None:
    taken: list[str] = []

    def send(batch: Sequence[AuditRecord]) -> Answer:
        messages = [record.message for record in batch]
        if "5" in messages and raises:
            raise ValueError("it is no text")
        if "5" in messages:
            return Answer(Verdict.DIVIDE, problem="it is bad")
        taken.extend(messages)
        return Answer(Verdict.TAKEN)

    with metrics.serving("127.0.0.1:0") as port:
        sender = Sender(send, Patience(batch=8, gather_seconds=60, end_seconds=60))
        for number in range(8):
            sender.put(AuditRecord(0.0, str(number), FACTS, ""))
        sender.end(abort=lambda: None)
        assert outcomes(port) == {"sent": 7, "refused": 1}
    assert taken == list("0123467")


def test_records_that_the_response_rejects_are_not_counted_as_sent(
    collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture
) -> None:
    kept, endpoint = collector
    kept.rejected = 1
    with metrics.serving("127.0.0.1:0") as port:
        patience = Patience(batch=3, gather_seconds=60, end_seconds=60)
        with sending_audit(settings(endpoint), service="slipway-coordinator", patience=patience):
            for number in range(3):
                write(number)
        assert outcomes(port) == {"sent": 2, "refused": 1}
    assert "1 record of the audit log did not reach the collector: too old" in caplog.text


def test_a_full_queue_drops_the_newest_records_and_delays_nobody(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    may_answer = threading.Event()
    kept.on_logs = lambda context: may_answer.wait(60)
    patience = Patience(most=5, batch=2, gather_seconds=0.01, end_seconds=60)
    with metrics.serving("127.0.0.1:0") as port:
        with sending_audit(settings(endpoint), service="slipway-coordinator", patience=patience):
            write(0)
            wait_for(lambda: kept.log_metadata)  # the thread waits for its answer
            began = time.monotonic()
            for number in range(1, 101):
                write(number)
            taken = time.monotonic() - began
            kept.on_logs = lambda context: None
            may_answer.set()
        assert outcomes(port) == {"sent": 5, "queue_full": 96}
    assert resources(kept) == list("01234")
    assert taken < unhurried(0.5)


def test_unknown_callers_leave_room_for_others(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    kept.on_logs = lambda context: refuse(context, grpc.StatusCode.UNAVAILABLE)
    patience = Patience(most=4, most_unnamed=2, batch=1, gather_seconds=0.01, pauses=(0.01,), end_seconds=60)
    with metrics.serving("127.0.0.1:0") as port:
        with sending_audit(settings(endpoint), service="slipway-coordinator", patience=patience):
            for number in range(5):
                write(number, principal="")
            for number in range(5, 9):
                write(number)
            assert outcomes(port) == {"queue_full": 3 + 2}
            kept.on_logs = lambda context: None
            wait_for(lambda: outcomes(port) == {"queue_full": 5, "sent": 4})
            write(9, principal="")  # there is room again
        assert resources(kept) == list("01569")


def test_a_collector_that_is_not_there_fails_no_call_and_does_not_delay_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    patience = Patience(batch=2, gather_seconds=0.01, end_seconds=0.2)
    with metrics.serving("127.0.0.1:0") as port:
        began = time.monotonic()
        with sending_audit(settings("http://127.0.0.1:9"), service="slipway-coordinator", patience=patience):
            for number in range(5):
                write(number)
        taken = time.monotonic() - began
        assert outcomes(port) == {}
    assert "5 records of the audit log did not reach the collector" in caplog.text
    assert taken < unhurried(4)


def test_a_failing_handler_fails_no_call_and_loses_no_line(
    collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with sending_audit(settings(collector[1]), service="slipway-coordinator", patience=QUICK):
        logging.getLogger("slipway.audit").info("a line without facts")
        write()
    assert [record.getMessage()[:12] for record in caplog.records if record.name == "slipway.audit"] == [
        "a line witho",
        'action="Canc',
    ]
    assert "Logging error" in capsys.readouterr().err
    assert resources(collector[0]) == ["0"]
