"""The trace of a call is in the audit log, at a collector too, and with the duration of the call; that of an unknown caller is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.observability import metrics
from slipway.observability.audit_records import Patience, sending_audit
from slipway.observability.telemetry import recording, span
from slipway.settings import Settings
from slipway.settings.security import Security
from support.coordinators.artifact_places import Place
from support.coordinators.harness import CONFIGURATION, wait_for
from support.servers.metrics_page import exemplars
from support.servers.otlp_collector import Collector, collecting, facts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Place(tmp_path_factory.mktemp("traces")) as place:
        yield place


@pytest.fixture
def collector(caplog: pytest.LogCaptureFixture) -> Iterator[Collector]:
    caplog.set_level(logging.INFO, logger="slipway.audit")
    with collecting() as (kept, endpoint):
        settings = Settings(home=Path("/nowhere"), scratch=Path("/nowhere"), audit="otlp", otlp_endpoint=endpoint)
        patience = Patience(gather_seconds=0.01)
        with (
            sending_audit(settings, service="slipway-coordinator", patience=patience),
            recording(InMemorySpanExporter()),
        ):
            yield kept


def records(kept: Collector, count: int) -> list[tuple[object, str]]:
    wait_for(lambda: len(kept.logs) >= count)
    return [(facts(record.attributes)["slipway.audit.action"], record.trace_id.hex()) for record in kept.logs]


def test_a_record_has_the_trace_of_the_call_or_of_the_export(
    place: Place, collector: Collector, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("of a trace")
    with place.client_of("submitter") as client:
        digest = client.push_artifact({"file": tmp_path / "file"})
        with span("mine") as mine:
            created = client.create_export(
                CONFIGURATION, sources={"base": digest, "adapter": digest}, export_id="traced"
            )
        client.cancel_export("traced")
        with span("another") as another, pytest.raises(ModelExportError):
            client.cancel_export("none")
    own, other = (one.traceparent.split("-")[1] for one in (mine, another))
    assert created.trace_id == own
    assert records(collector, 5)[2:] == [("CreateExport", own), ("CancelExport", own), ("CancelExport", other)]
    assert records(collector, 5)[:2] == [("CreateArtifact", "")] * 2
    sampled = [record.flags & 1 for record in collector.logs[2:]]
    assert sampled == [1, 0, 1], "whether the trace of the export is sampled is not known from the call"


def test_the_trace_that_an_unknown_caller_names_is_not_taken(
    place: Place, collector: Collector, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text("x" * 40)
    security = Security(token_file=tmp_path / "wrong")
    with (
        metrics.serving("127.0.0.1:0") as port,
        Client(place.address, security=security, project="red") as unknown,
        span("theirs"),
    ):
        with pytest.raises(ModelExportError):
            unknown.cancel_export("none")
        assert records(collector, 1) == [("CancelExport", "")]
        assert exemplars(port, metrics.CALL_SECONDS.name) == []


def test_the_duration_of_a_call_has_its_trace(place: Place, collector: Collector) -> None:
    with metrics.serving("127.0.0.1:0") as port, place.client_of("viewer", project="red") as client:
        list(client.list_exports())
        assert exemplars(port, metrics.CALL_SECONDS.name) == []
        with span("mine") as mine, pytest.raises(ModelExportError):
            client.get_export("none")
        ((sample, exemplar),) = wait_for(lambda: exemplars(port, metrics.CALL_SECONDS.name))
    assert sample.labels["method"] == "slipway.v1.ExportService/GetExport"
    assert exemplar.labels == {"trace_id": mine.traceparent.split("-")[1]}
