"""Events from a real coordinator to real receivers: in their order, again until they arrive, and no receiver in another's way."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml
from cloudevents.core.bindings.http import HTTPMessage, from_http_event

from slipway_coordinator.webhooks import lines, sender
from support.coordinators.harness import tiny_export, tiny_task, wait_for
from support.coordinators.webhook_places import cancel, coordinator, create, rows
from support.harness.unhurried import unhurried
from support.servers.free_ports import free_port
from support.servers.metrics_page import page
from support.servers.webhook_receiver import (
    SECRET,
    Received,
    WebhookReceiver,
    webhook_receiver,
)

pytestmark = pytest.mark.usefixtures("impatient")


def test_the_life_of_an_export_arrives_in_its_order(tmp_path: Path, receiver: WebhookReceiver) -> None:
    with coordinator(tmp_path, receiver.entry(), with_worker=True) as place:
        place.finished(place.submit(tiny_export("good", tiny_task("m"), base=place.base())))
        failing = tiny_task("m", fail="UNSUPPORTED")
        place.finished(place.submit(tiny_export("bad", failing, base=place.base())))
        receiver.wait_for("created", "started", "succeeded", export="/good")
        receiver.wait_for("created", "started", "failed", export="/bad")
        place.client.retry_export("bad")
        receiver.wait_for("created", "started", "failed", "retried", "started", "failed", export="/bad")
        place.client.delete_export("bad")
        receiver.wait_for("created", "started", "failed", "retried", "started", "failed", "deleted", export="/bad")
        wait_for(lambda: rows(place) == [])
    assert len({one.id for one in receiver.requests}) == len(receiver.requests) == 10
    for one in receiver.requests:
        event = from_http_event(HTTPMessage(dict(one.headers), one.body))
        assert event.get_data() == one.verified()["data"]
        assert event.get_id() == one.id
        assert event.get_source() == "/slipway"
    ends = [one.event["data"] for one in receiver.requests if one.type in {"succeeded", "failed"}]
    assert [end["state"] for end in ends] == ["EXPORT_STATE_SUCCEEDED", "EXPORT_STATE_FAILED", "EXPORT_STATE_FAILED"]
    assert ends[0]["outputs"]
    assert "m fails" in ends[1]["error"]["message"]
    assert [end["etag"].partition("-")[0] for end in ends] == ["1", "1", "2"]


def test_a_receiver_that_was_down_gets_everything_in_its_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="slipway.coordinator")
    down = WebhookReceiver(port=free_port())
    names = [f"e{number}" for number in range(20)]
    with coordinator(tmp_path, down.entry()) as place:
        create(place, *names)
        wait_for(lambda: len(rows(place)) == 40)
        for name in names:
            cancel(place.client, name)
        place.client.delete_export("e0")
        wait_for(lambda: caplog.text.count("does not take events"))
        time.sleep(1)  # for more attempts
        with place.server.coordinator.database._engine.begin() as connection:  # as after three days, less an hour
            connection.execute(sa.text("UPDATE slipway_deliveries SET create_time = create_time - 71 * 3600"))
        time.sleep(0.5)
        assert len(rows(place)) == 61
        with webhook_receiver(down):
            wait_for(lambda: len(down.taken) == 61)
            for name in names[1:]:
                down.wait_for("created", "started", "cancelled", export=f"/{name}")
            down.wait_for("created", "started", "cancelled", "deleted", export="/e0")
            wait_for(lambda: rows(place) == [])
            assert len({one.id for one in down.taken}) == 61
    assert caplog.text.count("does not take events; they wait and are sent again") == 1
    assert caplog.text.count("the receiver portal takes events again") == 1
    assert "/hook" not in caplog.text


def test_what_failed_is_sent_again_under_its_id(tmp_path: Path, receiver: WebhookReceiver) -> None:
    receiver.statuses = [500, 302, 400]
    with coordinator(tmp_path, receiver.entry()) as place:
        create(place, "x")
        receiver.wait_for("created", "started")
        wait_for(lambda: rows(place) == [])
    first = receiver.requests[:4]
    assert len({(one.id, one.body) for one in first}) == 1
    assert all(one.verified() for one in first)
    assert {one.path for one in receiver.requests} == {"/hook"}
    assert len(receiver.requests) == 5


@pytest.mark.slow
def test_a_dead_receiver_is_tried_seldom_and_holds_up_no_other(
    tmp_path: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = WebhookReceiver()
    dead.respond = lambda _, __: dead.ended.wait(30) and None  # it never responds
    with webhook_receiver(dead):
        entries = receiver.entry(), dead.entry("dead", timeout_seconds=1)
        monkeypatch.setattr(sender, "_FIRST_PAUSE", 4.0)
        monkeypatch.setattr(sender, "_LONGEST_DOWN_PAUSE", 4.0)
        with coordinator(tmp_path, *entries) as place:
            names = [f"e{number}" for number in range(30)]
            began = time.monotonic()
            create(place, *names)
            wait_for(lambda: len(receiver.taken) == 60)
            for name in names:
                receiver.wait_for("created", "started", export=f"/{name}")
            wait_for(lambda: len(dead.requests) >= lines.DOWN_AFTER)
            time.sleep(3)
            longest = time.monotonic() - began
            # The first ones go side by side until the third failure, then one every 3 seconds: its time, and at least half of the pause.
            most = lines.MOST_AT_ONCE + lines.DOWN_AFTER - 1 + longest / 3 + 1
            assert lines.DOWN_AFTER <= len(dead.requests) <= most
            monkeypatch.setattr(sender, "_LONGEST_DOWN_PAUSE", 0.5)
            dead.respond = None
            wait_for(lambda: len({one.id for one in dead.taken}) == 60)
            wait_for(lambda: rows(place) == [])
    assert not [thread for thread in threading.enumerate() if thread.name == "slipway-webhook"]


def test_refused_events_keep_their_pauses_and_hold_up_no_other(
    tmp_path: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "_FIRST_PAUSE", 2.0)
    monkeypatch.setattr(sender, "_LONGEST_PAUSE", 60.0)
    monkeypatch.setattr(sender, "_LONGEST_DOWN_PAUSE", 60.0)
    receiver.respond = lambda request, _: 422 if "/bad" in request.event["subject"] else 204
    with coordinator(tmp_path, receiver.entry()) as place:
        create(place, *(f"bad{number}" for number in range(6)))
        wait_for(lambda: len(receiver.requests) >= 12, seconds=60)  # each twice
        assert not place.server._sender._lines["portal"].is_down
        for number in range(3):
            began = time.monotonic()
            create(place, f"good{number}")
            receiver.wait_for("created", "started", export=f"/good{number}")
            assert time.monotonic() - began < unhurried(3)
        attempts = {row.export: row.attempts for row in rows(place) if row.type == "export.created"}
        assert max(attempts.values()) <= 5, "the pauses double, whatever else arrives"
    assert caplog.text.count("the receiver portal refuses export.created of") == 6, "each is logged once"


@pytest.mark.slow
def test_retry_after_holds_for_all_events(tmp_path: Path, receiver: WebhookReceiver) -> None:
    def busy(_: Received, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(429)
        handler.send_header("Retry-After", "3")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with coordinator(tmp_path, receiver.entry()) as place:
        receiver.respond = busy
        create(place, "x")
        wait_for(lambda: receiver.requests)
        asked, number = time.monotonic(), len(receiver.requests)
        receiver.respond = None
        create(place, "y")
        time.sleep(1.5)
        assert len(receiver.requests) <= number + lines.MOST_AT_ONCE - 1, "only what was under way"
        receiver.wait_for("created", "started", export="/x")
        receiver.wait_for("created", "started", export="/y")
        assert time.monotonic() - asked > 2.5


def test_what_cannot_be_stored_is_not_sent_again_at_once(
    tmp_path: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "_HOLD_SECONDS", 2.0)
    with coordinator(tmp_path, receiver.entry()) as place:
        table = place.server.coordinator.database.deliveries
        remove, failures = table.remove, [RuntimeError("of the test")]

        def fail_once(*arguments: Any) -> None:
            if failures:
                raise failures.pop()
            remove(*arguments)

        monkeypatch.setattr(table, "remove", fail_once)
        create(place, "x")
        wait_for(lambda: "cannot be stored, so it is sent again" in caplog.text)
        time.sleep(1)
        assert len(receiver.requests) == 1
        wait_for(lambda: rows(place) == [])
    assert [one.type for one in receiver.requests] == ["created", "created", "started"]
    assert receiver.requests[0].id == receiver.requests[1].id


def test_what_a_receiver_is_not_told_any_more_is_not_sent(tmp_path: Path) -> None:
    down = WebhookReceiver(port=free_port())
    with coordinator(tmp_path, down.entry()) as place:
        create(place, "x", "y")
        wait_for(lambda: len(rows(place)) == 4)
    with webhook_receiver(down), coordinator(tmp_path, down.entry(events=["export.started"])) as place:
        for name in ("x", "y"):
            down.wait_for("started", export=f"/{name}")
        wait_for(lambda: rows(place) == [])
    assert {one.type for one in down.requests} == {"started"}


def test_an_event_that_fails_holds_up_its_export_alone(tmp_path: Path, receiver: WebhookReceiver) -> None:
    receiver.respond = lambda request, _: 500 if request.event["subject"].endswith("/bad") else 204
    with coordinator(tmp_path, receiver.entry()) as place:
        create(place, "bad", "good", "better")
        receiver.wait_for("created", "started", export="/good")
        receiver.wait_for("created", "started", export="/better")
        wait_for(lambda: len(receiver.requests) > 8)
        assert {one.type for one in receiver.requests if one not in receiver.taken} == {"created"}
        create(place, "best")
        receiver.wait_for("created", "started", export="/best")
        receiver.respond = None
        receiver.wait_for("created", "started", export="/bad")


def test_a_receiver_that_is_gone_gets_nothing_twice(
    tmp_path: Path, receiver: WebhookReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.statuses = [410]
    with coordinator(tmp_path, receiver.entry()) as place:
        create(place, "x")
        receiver.wait_for("started")
        wait_for(lambda: rows(place) == [])
    assert [one.type for one in receiver.requests] == ["created", "started"]
    lost = f"export.created of projects/default/exports/x ({receiver.requests[0].id}) will not be sent"
    assert f"{lost}: the receiver portal does not want it: it responded with status 410" in caplog.text


def test_a_receiver_hears_of_its_projects_and_events_alone(tmp_path: Path, receiver: WebhookReceiver) -> None:
    with webhook_receiver() as elsewhere:
        entries = receiver.entry(events=["export.cancelled"]), elsewhere.entry("elsewhere", projects=["other"])
        with coordinator(tmp_path, *entries) as place:
            create(place, "x")
            cancel(place.client, "x")
            receiver.wait_for("cancelled")
            wait_for(lambda: rows(place) == [])
        assert elsewhere.requests == []


def test_receivers_and_secrets_change_without_a_restart(tmp_path: Path, receiver: WebhookReceiver) -> None:
    second = "whsec_" + "B" * 32
    with coordinator(tmp_path, receiver.entry()) as place:
        create(place, "a")
        receiver.wait_for("created", "started")
        (tmp_path / "webhooks" / "secret").write_text(second)
        time.sleep(0.5)  # until the files are read again
        create(place, "b")
        receiver.wait_for("created", "started", "created", "started")
        path = tmp_path / "webhooks" / "webhooks.yaml"
        path.write_text("receivers: [")
        time.sleep(0.5)
        create(place, "c")
        receiver.wait_for(*["created", "started"] * 3)  # what cannot be used changes nothing
        path.write_text(yaml.safe_dump({"receivers": [receiver.entry("other", events=["export.created"])]}))
        time.sleep(0.5)
        create(place, "d")
        receiver.wait_for(*["created", "started"] * 3, "created")
    assert [one.verified(second if one.event["subject"][-1] > "a" else SECRET) for one in receiver.taken]


def test_a_stop_ends_what_is_under_way_and_the_next_start_sends_it(tmp_path: Path) -> None:
    slow = WebhookReceiver()
    slow.respond = lambda _, __: slow.ended.wait(30) and None
    with webhook_receiver(slow):
        with coordinator(tmp_path, slow.entry(timeout_seconds=60)) as place:
            create(place, "x")
            wait_for(lambda: slow.requests)
            began = time.monotonic()
        assert time.monotonic() - began < 20
        (first,) = slow.requests
        slow.respond = None
        with coordinator(tmp_path, slow.entry(timeout_seconds=60)):
            slow.wait_for("created", "started")
        assert slow.taken[0].id == first.id
        assert slow.taken[0].body == first.body


def test_no_response_of_a_receiver_reaches_the_log_as_it_is(
    tmp_path: Path, receiver: WebhookReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(_: Received, handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b'HTTP/9 \x1b[31m\xe2\x80\xae{"level":"error"}\r\nsecond line\r\n')
        handler.close_connection = True

    receiver.respond = lie
    with coordinator(tmp_path, receiver.entry()) as place:
        create(place, "x")
        wait_for(lambda: "does not take events" in caplog.text)
        receiver.respond = None
        receiver.wait_for("created", "started")
    assert "\x1b" not in caplog.text
    assert SECRET not in caplog.text


def test_what_is_sent_is_measured(tmp_path: Path, receiver: WebhookReceiver) -> None:
    from slipway.observability import metrics

    receiver.statuses = [500, 410]
    with metrics.serving(f"127.0.0.1:{(port := free_port())}"):
        with coordinator(tmp_path, receiver.entry()) as place:
            create(place, "x")
            receiver.wait_for("started")
            receiver.respond = lambda *_: 500
            create(place, "y")
            label = (("receiver", "portal"),)
            wait_for(lambda: page(port).get(("slipway_webhook_events_waiting", label)) == 2)
            wait_for(lambda: page(port)["slipway_webhook_oldest_seconds", label] > 0.5)
            measured = page(port)
            with place.server.coordinator.database._engine.begin() as connection:
                connection.execute(sa.text("UPDATE slipway_deliveries SET receiver = 'old' WHERE attempts = 0"))
            wait_for(lambda: page(port)["slipway_webhook_events_waiting", label] == 1)
            old = (("receiver", "old"),)
            assert ("slipway_webhook_oldest_seconds", old) not in page(port), "nobody waits for what has no receiver"
        attempts = {
            dict(labels)["outcome"]: value
            for (name, labels), value in measured.items()
            if name == "slipway_webhook_attempts_total"
        }
        assert (attempts["delivered"], attempts["gone"]) == (1, 1)
        assert attempts["failed"] >= 2
        assert measured["slipway_webhook_events_lost_total", label] == 1
        assert ("slipway_webhook_events_waiting", label) not in page(port), "it is the active coordinator's"


def test_bodies_are_those_of_the_moment(tmp_path: Path) -> None:
    down = WebhookReceiver(port=free_port())
    with coordinator(tmp_path, down.entry()) as place:
        create(place, "x")
        cancel(place.client, "x")
        with webhook_receiver(down):
            down.wait_for("created", "started", "cancelled")
    told = [json.loads(one.body)["data"] for one in down.taken]
    assert [one["state"][13:].lower() for one in told] == ["queued", "running", "cancelled"]
    assert [int(one["etag"].partition("-")[2]) for one in told] == sorted({int(one["etag"][2:]) for one in told})
