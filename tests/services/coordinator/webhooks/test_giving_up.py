"""What waits for a receiver is given up after its time, and never for an outage of the coordinator's own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from slipway_coordinator.webhooks import housekeeping, sender
from support.coordinators.harness import Harness, wait_for
from support.coordinators.webhook_places import cancel, coordinator, create, rows
from support.servers.free_ports import free_port
from support.servers.webhook_receiver import (
    WebhookReceiver,
    webhook_receiver,
)

pytestmark = pytest.mark.usefixtures("impatient")


def test_what_waits_for_too_long_is_given_up(
    tmp_path: Path, receiver: WebhookReceiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "GRACE_SECONDS", 0.5)
    receiver.respond = lambda *_: 500
    with coordinator(tmp_path, receiver.entry(keep_hours=2)) as place:
        create(place, "x", "y")
        wait_for(lambda: len(receiver.requests) >= 3 and len(rows(place)) == 4)
        with place.server.coordinator.database._engine.begin() as connection:
            old = "UPDATE slipway_deliveries SET create_time = create_time - 7201 WHERE export LIKE '%/x'"
            connection.execute(sa.text(old))
            name = "UPDATE slipway_deliveries SET create_time = create_time - 259201, receiver = 'old' WHERE export LIKE '%/y'"
            connection.execute(sa.text(name))
        wait_for(lambda: rows(place) == [])
        create(place, "z")
        receiver.respond = None
        receiver.wait_for("created", "started")
    assert "the receiver portal did not take it within 2 hours" in caplog.text
    assert "the webhooks file does not name its receiver" in caplog.text


def test_an_outage_of_the_coordinator_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What waits is older than its time when the next coordinator begins to send, and the receiver is not back yet."""
    down = WebhookReceiver(port=free_port())
    with coordinator(tmp_path, down.entry()) as place:
        create(place, "x", "y")
        wait_for(lambda: any(attempts for _, _, attempts, _ in rows(place)))
        with place.server.coordinator.database._engine.begin() as connection:
            connection.execute(sa.text("UPDATE slipway_deliveries SET create_time = create_time - 96 * 3600"))
        number = len(rows(place))
    with coordinator(tmp_path, down.entry()) as place:
        time.sleep(2)
        assert len(rows(place)) >= number
        with webhook_receiver(down):
            for name in ("x", "y"):
                down.wait_for("created", "started", export=f"/{name}")
            wait_for(lambda: rows(place) == [])
    assert "will not be sent" not in caplog.text


def test_what_a_dead_receiver_was_never_sent_is_given_up_once_it_was_down_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(housekeeping, "GRACE_SECONDS", 0.0)
    with coordinator(tmp_path, WebhookReceiver(port=free_port()).entry(keep_hours=2)) as place:
        create(place, "x")
        line = place.server._sender._lines["portal"]
        wait_for(lambda: line.is_down)
        with place.server.coordinator.database._engine.begin() as connection:
            connection.execute(sa.text("UPDATE slipway_deliveries SET create_time = create_time - 7201"))
        wait_for(lambda: [row.type for row in rows(place)] == ["export.started"] and rows(place)[0].attempts == 0)
        line.not_before = time.monotonic() + 3600  # nothing more is tried
        time.sleep(0.5)
        kept = [row for row in rows(place) if row.attempts == 0]
        line.down_since = time.monotonic() - 7201
        wait_for(lambda: rows(place) == [])
    assert len(kept) <= 1
    assert "did not take it within 2 hours" in caplog.text


def test_too_many_that_wait_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(housekeeping, "MOST_WAITING", 5)
    with coordinator(tmp_path, WebhookReceiver(port=free_port()).entry()) as place:
        create(place, *(f"e{number}" for number in range(10)))
        wait_for(lambda: "more than 5 events wait for the receiver portal" in caplog.text)
        wait_for(lambda: len(rows(place)) == 5)


def test_what_waits_is_kept_by_a_coordinator_without_the_file(tmp_path: Path) -> None:
    down = WebhookReceiver(port=free_port())
    with coordinator(tmp_path, down.entry()) as place:
        create(place, "x")
        wait_for(lambda: len(rows(place)) == 2)
    with Harness(tmp_path, with_worker=False) as place:
        cancel(place.client, "x")
        assert len(rows(place)) == 2
    with webhook_receiver(down), coordinator(tmp_path, down.entry()):
        down.wait_for("created", "started")


def test_what_waits_for_nobody_is_given_up_by_a_coordinator_without_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(housekeeping, "GRACE_SECONDS", 0.0)
    with coordinator(tmp_path, WebhookReceiver(port=free_port()).entry()) as place:
        create(place, "x")
        wait_for(lambda: len(rows(place)) == 2)
        with place.server.coordinator.database._engine.begin() as connection:
            connection.execute(sa.text("UPDATE slipway_deliveries SET create_time = create_time - 73 * 3600"))
    with Harness(tmp_path, with_worker=False) as place:
        wait_for(lambda: rows(place) == [])
    assert "the webhooks file does not name its receiver" in caplog.text


@pytest.mark.slow
def test_a_standby_that_waited_for_long_is_as_patient_as_one_that_starts(
    tmp_path: Path, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = sender.Sender.start

    def start_late(one: sender.Sender) -> None:
        time.sleep(2.5)
        start(one)

    monkeypatch.setattr(housekeeping, "GRACE_SECONDS", 2.0)
    with coordinator(tmp_path, WebhookReceiver(port=free_port()).entry("old")) as place:
        create(place, "x")
        wait_for(lambda: len(rows(place)) == 2)
        with place.server.coordinator.database._engine.begin() as connection:
            connection.execute(sa.text("UPDATE slipway_deliveries SET create_time = create_time - 73 * 3600"))
    monkeypatch.setattr(sender.Sender, "start", start_late)
    with coordinator(tmp_path, receiver.entry()) as place:
        time.sleep(0.7)
        assert [one.receiver for one in rows(place)] == ["old", "old"]
        wait_for(lambda: rows(place) == [])


def test_after_the_clock_was_set_nothing_is_too_old_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    patience, real = housekeeping.Patience(), time.time
    time.sleep(0.2)
    assert patience.seconds() >= 0.2
    for moved in (100 * 3600, 0):
        monkeypatch.setattr(time, "time", lambda moved=moved: real() + moved)
        assert patience.seconds() < 0.1
    time.sleep(0.2)
    assert patience.seconds() >= 0.2
