"""Readers of an export's events over HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

from slipway_coordinator.model.records import ExportRecord
from support.coordinators.harness import tiny_export, tiny_task
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
