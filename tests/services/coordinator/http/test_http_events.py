"""WatchExport over HTTP: server-sent events that can be resumed, are kept alive, and end with the export."""

from __future__ import annotations

import asyncio
import time

import pytest

from slipway_coordinator.http import responses
from slipway_coordinator.lifecycle.records import ExportRecord
from support.coordinators.event_readers import Reader, submit
from support.coordinators.harness import wait_for
from support.coordinators.http_places import HttpPlace


def test_events_come_until_the_export_ends(place: HttpPlace) -> None:
    name = submit(place, "watched")
    reader = Reader(place, name)
    events = reader.events()
    first = next(events)
    assert first["event"] == "export"
    assert first["data"]["export"]["name"] == name
    assert first["id"] == first["data"]["sequence"]
    assert place.call("submitter", "POST", f"/v1/{name}:cancel").status == 200
    rest = list(events)
    assert rest[-1]["data"]["export"]["state"] == "EXPORT_STATE_CANCELLED"
    ids = [int(event["id"]) for event in (first, *rest)]
    assert ids == sorted(set(ids))
    reader.close()
    again = Reader(place, name, **{"last-event-id": str(ids[-1])})
    assert again.response.status == 204  # browsers do not reconnect after that
    assert list(again.events()) == []
    newest = list(Reader(place, name, **{"last-event-id": str(ids[-1] - 1)}).events())
    assert [event["id"] for event in newest] == [str(ids[-1])]
    for nothing in ("x", "-1", "9" * 400):  # an id that no event has is none
        assert list(Reader(place, name, **{"last-event-id": nothing}).events())[-1]["id"] == str(ids[-1])


def test_a_silent_stream_is_kept_alive_and_leaves_with_its_reader(
    place: HttpPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_HEARTBEAT_SECONDS", 0.2)
    name = submit(place, "silent")
    reader = Reader(place, name, **{"last-event-id": str(2**62)})  # nothing is new to it
    lines = reader.lines()
    began = time.monotonic()
    assert [next(lines) for _ in range(4)] == [": the stream goes on", "", ": the stream goes on", ""]
    assert time.monotonic() - began < 30
    streams = place.server._server._interceptors[0]._streams._open
    assert streams["viewer"] == 1
    reader.close()
    wait_for(lambda: not streams["viewer"])


def test_a_stream_that_nobody_may_see_is_refused_before_it_begins(place: HttpPlace) -> None:
    name = submit(place, "hidden")
    refused = place.call("neighbour", "GET", f"/v1/{name}:watch")
    assert (refused.status, refused.reason) == (404, "EXPORT_NOT_FOUND")
    assert place.call("viewer", "GET", "/v1/projects/red/exports/none:watch").status == 404
    assert place.call("viewer", "HEAD", f"/v1/{name}:watch").status == 405


def test_a_refusal_that_takes_long_is_not_begun_as_a_stream(place: HttpPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    load = place.server.coordinator.load

    async def load_slowly(name: str) -> ExportRecord | None:
        await asyncio.sleep(0.5)
        return await load(name)

    monkeypatch.setattr(responses, "_FIRST_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(place.server.coordinator, "load", load_slowly)
    refused = place.call("viewer", "GET", "/v1/projects/red/exports/none:watch")
    assert (refused.status, refused.reason) == (404, "EXPORT_NOT_FOUND")
