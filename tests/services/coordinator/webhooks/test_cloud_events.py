"""Which changes are events, and that their bodies are CloudEvents that other programs take."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event

from slipway.errors import Failure
from slipway.observability import metrics
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, TaskState
from slipway_coordinator.storage.deliveries import Delivery
from slipway_coordinator.webhooks.announcer import WebhookAnnouncer
from slipway_coordinator.webhooks.cloud_events import MOST_BYTES, EventType, event_body, event_id
from slipway_coordinator.webhooks.receivers import load_webhooks
from support.coordinators.harness import DIGEST, tiny_export, tiny_task
from support.servers.free_ports import free_port
from support.servers.metrics_page import page
from support.servers.webhook_receiver import webhooks_file

E = ExportState
GOOD = {"url": "https://portal.example/hook", "secret_file": "secret"}


def announcer(folder: Path, *entries: dict[str, Any]) -> WebhookAnnouncer:
    webhooks = load_webhooks(webhooks_file(folder, *entries, source="https://slipway.example"))
    return WebhookAnnouncer(lambda: webhooks)


def export(**more: Any) -> ExportRecord:
    task = tiny_task("onnx").with_(state=TaskState.SUCCEEDED, outputs={"out": DIGEST})
    return tiny_export("x", task).with_(create_time=1_800_000_000.25, labels={"team": "Sprach-Ü"}, **more)


def test_every_change_of_state_is_an_event(tmp_path: Path) -> None:
    tell = announcer(tmp_path, {"name": "a", **GOOD}).tell_change
    moves = [(None, E.QUEUED), (E.QUEUED, E.RUNNING), (E.RUNNING, E.RUNNING), (E.RUNNING, E.CANCELLING)]
    moves += [(E.CANCELLING, E.CANCELLED), (E.RUNNING, E.SUCCEEDED), (E.RUNNING, E.FAILED), (E.FAILED, E.QUEUED)]
    told = [one.type for before, after in moves for one in tell(before, export(state=after))]
    names = ["created", "started", "cancelling", "cancelled", "succeeded", "failed", "retried"]
    assert told == [f"export.{name}" for name in names]
    deletion = announcer(tmp_path, {"name": "a", **GOOD}).tell_deletion(export(state=E.FAILED, revision=7))
    assert [(one.type, one.revision) for one in deletion] == [("export.deleted", 8)]


def test_a_receiver_is_told_of_its_projects_and_events_alone(tmp_path: Path) -> None:
    entries = [
        {"name": "all", **GOOD},
        {"name": "other", **GOOD, "projects": ["other"]},
        {"name": "this", **GOOD, "projects": ["default", "other"], "events": ["export.failed"]},
    ]
    tell = announcer(tmp_path, *entries).tell_change
    assert [one.receiver for one in tell(E.RUNNING, export(state=E.FAILED))] == ["all", "this"]
    assert [one.receiver for one in tell(E.RUNNING, export(state=E.SUCCEEDED))] == ["all"]
    assert len({one.id for one in tell(E.RUNNING, export(state=E.FAILED))}) == 1, "it is one event"
    assert announcer(tmp_path, entries[1]).tell_change(None, export()) == ()


def test_an_event_that_cannot_be_made_is_counted_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    tell = announcer(tmp_path, {"name": "a", **GOOD}, {"name": "b", **GOOD}).tell_change
    broken = export(state=E.RUNNING, begin_time=1e300)
    with metrics.serving(f"127.0.0.1:{port}"):
        before = [page(port).get(("slipway_webhook_events_lost_total", (("receiver", name),)), 0) for name in "ab"]
        assert tell(E.QUEUED, broken) == ()
        after = [page(port)["slipway_webhook_events_lost_total", (("receiver", name),)] for name in "ab"]
    assert after == [number + 1 for number in before]
    assert "no event can be made for a change of projects/default/exports/x" in caplog.text


def parsed(delivery: Delivery) -> Any:
    headers = {"content-type": "application/cloudevents+json; charset=utf-8"}
    return from_http_event(HTTPMessage(headers, delivery.body.encode()))


def test_a_body_is_a_cloud_event(tmp_path: Path) -> None:
    end = export(state=E.SUCCEEDED, end_time=1_800_000_100.0, warnings=("a\u2028 warning",), revision=9)
    (delivery,) = announcer(tmp_path, {"name": "a", **GOOD}).tell_change(E.RUNNING, end)
    event = parsed(delivery)
    assert (event.get_specversion(), event.get_source()) == ("1.0", "https://slipway.example")
    assert event.get_type() == "dev.slipway.export.succeeded"
    assert event.get_subject() == "projects/default/exports/x"
    assert event.get_time() == datetime.fromtimestamp(1_800_000_100, UTC)
    assert event.get_id() == delivery.id
    assert event.get_datacontenttype() == "application/json"
    data = event.get_data()
    assert (data["state"], data["outputs"], data["etag"]) == ("EXPORT_STATE_SUCCEEDED", {"onnx": DIGEST}, "1-9")
    assert data["labels"] == {"team": "Sprach-Ü"}
    assert data["createTime"] == "2027-01-15T08:00:00.250Z"
    assert not {"configuration", "sources", "tasks"} & set(data)


def test_the_time_is_that_of_the_change(tmp_path: Path) -> None:
    tell = announcer(tmp_path, {"name": "a", **GOOD}).tell_change
    (created,) = tell(None, export())
    (started,) = tell(E.QUEUED, export(state=E.RUNNING, begin_time=1_800_000_001.5))
    (cancelling,) = tell(E.RUNNING, export(state=E.CANCELLING, begin_time=1_800_000_001.5))
    assert [parsed(one).get_time().timestamp() for one in (created, started)] == [1_800_000_000.25, 1_800_000_001.5]
    assert abs(parsed(cancelling).get_time().timestamp() - datetime.now(UTC).timestamp()) < 60


def test_ids_follow_from_the_change() -> None:
    one = event_id(EventType.FAILED, export(revision=5))
    assert one == event_id(EventType.FAILED, export(revision=6)), "a run fails once"
    others = [
        event_id(EventType.CANCELLED, export()),
        event_id(EventType.FAILED, export(run=2)),
        event_id(EventType.FAILED, export(name="projects/default/exports/y")),
        event_id(EventType.FAILED, export().with_(create_time=1_800_000_001.0)),  # made again after a deletion
    ]
    assert len({one, *others}) == 5
    assert all(identity.isalnum() and len(identity) == 32 for identity in (one, *others))


@pytest.mark.parametrize("character", ["x", "ü", "\u0000", "\U0001f600", '"'])
def test_a_body_has_a_limit_whatever_is_in_it(character: str) -> None:
    much = export(
        state=E.FAILED,
        warnings=tuple(character * 1000 for _ in range(1000)),
        failure=Failure(reason="STAGE_ERROR", message=character * 200_000, about={"a": character * 200_000}),
    )
    labelled = much.with_(labels={f"l{number}": character * 512 for number in range(64)}, warnings=())
    small = much.with_(failure=None)
    for record in (much, labelled, small):
        body = event_body(EventType.FAILED, record, identity="i", source="/slipway", at=1.0)
        assert len(body.encode()) <= MOST_BYTES
        data = json.loads(body)["data"]
        assert data["name"] == record.name
        assert "warnings" not in data
    assert json.loads(event_body(EventType.FAILED, small, identity="i", source="/s", at=1.0))["data"]["labels"]
    assert json.loads(body)["data"]["state"] == "EXPORT_STATE_FAILED"
