"""Readers of an export's events over HTTP."""

from __future__ import annotations

import http.client
import itertools
import json
from collections.abc import Iterator
from typing import Any

from slipway.rpc.values import export_state
from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.harness import Harness, tiny_export, tiny_task
from support.coordinators.http_places import HttpPlace

Told = tuple[str, str, str]
"""Kind, export and state of a change."""


def submit(place: HttpPlace, export_id: str) -> str:
    """Create an export of red whose only task waits for a worker that never comes."""
    return submit_to(place, "red", export_id)


def submit_to(place: Harness, project: str, export_id: str, **fields: Any) -> str:
    """Create an export of a project whose only task waits for a worker that never comes."""
    record = tiny_export(export_id, tiny_task("a")).model_dump()
    named = {**record, "name": f"projects/{project}/exports/{export_id}", **fields}
    return place.submit(ExportRecord.model_validate(named))


def told(event: pb.ExportsEvent) -> Told:
    """Return kind, export and state of a change; nothing for another event."""
    if event.WhichOneof("event") != "change":
        return (event.WhichOneof("event") or "", "", "")
    kind = pb.ExportChangeKind.Name(event.change.kind).removeprefix("EXPORT_CHANGE_KIND_").lower()
    return kind, event.change.export.name.removeprefix("projects/"), export_state(event.change.export.state)


def take(events: Iterator[pb.ExportsEvent], count: int) -> list[pb.ExportsEvent]:
    return list(itertools.islice(events, count))


class Reader:
    """An open stream of events: of an export, or of the exports of a project (``projects/red/exports``) with a query."""

    def __init__(self, place: HttpPlace, name: str, *, query: str = "", **headers: str) -> None:
        self._connection = http.client.HTTPConnection(place.http_address, timeout=60)
        sent = {"authorization": f"Bearer {place.tokens['viewer']}", **headers}
        self._connection.request("GET", f"/v1/{name}:watch{query}", headers=sent)
        self.response = self._connection.getresponse()
        if self.response.status == 204:  # nothing is left
            return
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
