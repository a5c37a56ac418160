"""WatchExport over HTTP: server-sent events that can be resumed, are kept alive, and end with the export."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slipway_coordinator.http import responses
from slipway_coordinator.model.records import ExportRecord
from support.coordinators.harness import tiny_export, tiny_task, wait_for
from support.coordinators.http_places import HttpPlace


def submit(place: HttpPlace, export_id: str) -> str:
    """Create an export of red whose only task waits for a worker that never comes."""
    record = tiny_export(export_id, tiny_task("a"))
    return place.submit(
        ExportRecord.model_validate({**record.model_dump(), "name": f"projects/red/exports/{export_id}"})
    )


class Reader:
    """An open stream of events."""

    def __init__(self, place: HttpPlace, name: str, **headers: str) -> None:
        self._connection = http.client.HTTPConnection(place.http_address, timeout=60)
        sent = {"authorization": f"Bearer {place.tokens['viewer']}", **headers}
        self._connection.request("GET", f"/v1/{name}:watch", headers=sent)
        self.response = self._connection.getresponse()
        assert self.response.status == 200
        assert self.response.headers["content-type"] == "text/event-stream"

    def lines(self) -> Iterator[str]:
        while line := self.response.readline():
            yield line.decode().rstrip("\n")

    def events(self) -> Iterator[dict[str, Any]]:
        event: dict[str, Any] = {}
        for line in self.lines():
            if not line and event:
                yield event
                event = {}
            elif line and not line.startswith(":"):
                key, _, value = line.partition(": ")
                event[key] = json.loads(value) if key == "data" else value

    def close(self) -> None:
        self.response.close()
        self._connection.close()


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
    again = list(Reader(place, name, **{"last-event-id": str(ids[-1])}).events())
    assert again == []
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
    assert [next(lines) for _ in range(4)] == [": the export goes on", "", ": the export goes on", ""]
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


def test_a_coordinator_that_ends_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with HttpPlace(tmp_path_factory.mktemp("ending")) as ending:
        reader = Reader(ending, submit(ending, "going"))
        events = reader.events()
        next(events)
    last = list(events)[-1]
    assert (last["event"], last["data"]["code"]) == ("error", 14)
    reader.close()
