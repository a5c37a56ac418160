"""Formats, workers and all exports of a project over HTTP: JSON as described, and server-sent events whose id is the cursor."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from slipway_coordinator.http import responses
from support.coordinators.event_readers import Reader, submit
from support.coordinators.harness import wait_for
from support.coordinators.http_places import HttpPlace

DOCUMENT: dict[str, Any] = json.loads(resources.files("slipway_protos").joinpath("v1/openapi.json").read_bytes())
RED = "projects/red/exports"


def take(events: Any, count: int) -> list[dict[str, Any]]:
    return [next(events) for _ in range(count)]


def check(schema: str, value: Any) -> None:
    """Compare a value with a schema of the document."""
    whole = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    Draft202012Validator(whole).validate(value)


def test_formats_and_workers_are_what_the_document_says(place: HttpPlace) -> None:
    first = place.call("viewer", "GET", "/v1/formats?pageSize=3").json
    check("ListFormatsResponse", first)
    assert len(first["formats"]) == 3
    rest = place.call("viewer", "GET", f"/v1/formats?pageToken={first['nextPageToken']}").json
    by_name = {each["name"]: each for each in first["formats"] + rest["formats"]}
    assert by_name["gguf"]["settingsSchema"]["properties"]["enabled"]["type"] == "boolean"
    Draft202012Validator.check_schema(by_name["onnx"]["settingsSchema"])
    (info,) = (each for each in by_name["gguf"]["obstacle"]["details"] if each["@type"].endswith("ErrorInfo"))
    assert (info["reason"], info["metadata"]["stage"]) == ("NO_WORKER", "merge")
    submit(place, "queued")
    wait_for(lambda: place.call("viewer", "GET", "/v1/workers").json.get("queue"))
    answer = place.call("viewer", "GET", "/v1/workers").json
    check("ListWorkersResponse", answer)
    assert {each["project"] for each in answer["queue"]} == {"red"}
    assert {each["reason"] for each in answer["queue"]} == {"WAIT_REASON_NO_WORKER"}
    assert all("project" not in each for each in place.call("neighbour", "GET", "/v1/workers").json["queue"])
    answer = place.call("viewer", "GET", "/v1/projects").json
    check("ListProjectsResponse", answer)
    (project,) = answer["projects"]
    assert (project["name"], project["usage"]["unendedExports"]) == ("projects/red", 1)
    for path in (
        "/v1/projects?pageToken=x",
        "/v1/formats?pageToken=x",
        "/v1/workers?pageToken=x",
        "/v1/workers?pageSize=-1",
    ):
        assert place.call("viewer", "GET", path).status == 400
    assert place.call("", "GET", "/v1/workers").status == 401
    assert place.call("viewer", "POST", "/v1/workers", {}).status == 405


def test_all_exports_of_a_project_are_watched_and_resumed_by_the_last_id(place: HttpPlace) -> None:
    reader = Reader(place, RED)
    events = reader.events()
    first = next(events)
    assert first["event"] == "bookmark"
    assert first["id"] == first["data"]["cursor"]
    name = submit(place, "watched-here")
    assert place.call("submitter", "POST", f"/v1/{name}:cancel").status == 200
    seen = take(events, 3)
    reader.close()
    check("ExportsEvent", seen[0]["data"])
    assert [event["event"] for event in seen] == ["change"] * 3
    assert [event["data"]["change"]["kind"] for event in seen] == [
        "EXPORT_CHANGE_KIND_CREATED", *["EXPORT_CHANGE_KIND_STATE_CHANGED"] * 2,
    ]  # fmt: skip
    assert seen[-1]["data"]["change"]["export"]["state"] == "EXPORT_STATE_CANCELLED"
    for number, event in enumerate(seen[:-1]):
        again = Reader(place, RED, query="?cursor=nonsense", **{"last-event-id": event["id"]})  # the header decides
        found = again.events()
        assert next(found)["event"] == "bookmark"
        assert take(found, 2 - number) == seen[number + 1 :]
        again.close()
    filtered = Reader(place, RED, query=f"?cursor={first['id']}&filter=state%3Dcancelled")
    found = filtered.events()
    assert [event["id"] for event in take(found, 2)] == [first["id"], seen[-1]["id"]]
    filtered.close()
    wait_for(lambda: not place.server.coordinator.feed._watchers)


@pytest.mark.parametrize(
    ("who", "path", "status", "reason"),
    [
        ("viewer", "?cursor=nonsense", 400, "REQUEST_INVALID"),
        ("viewer", "?cursor=1-1", 400, "CURSOR_EXPIRED"),
        ("viewer", "?filter=state%3Dlost", 400, "REQUEST_INVALID"),
        ("viewer", "?afterSequence=1", 400, "REQUEST_INVALID"),
        ("neighbour", "", 403, "PERMISSION_DENIED"),
        ("", "", 401, "UNAUTHENTICATED"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_it_begins(
    place: HttpPlace, who: str, path: str, status: int, reason: str
) -> None:
    refused = place.call(who, "GET", f"/v1/{RED}:watch{path}")
    assert (refused.status, refused.reason) == (status, reason)


@pytest.mark.parametrize("text", ["x", "1-1-1", "é", "1" * 200])
def test_an_id_that_no_event_has_is_refused(place: HttpPlace, text: str) -> None:
    headers = {"last-event-id": text.encode().decode("latin-1")}
    assert place.call("viewer", "GET", f"/v1/{RED}:watch", **headers).status == 400


def test_a_silent_stream_is_kept_alive(place: HttpPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_HEARTBEAT_SECONDS", 0.2)
    reader = Reader(place, RED)
    lines = reader.lines()
    wait_for(lambda: next(lines).startswith(": the stream goes on"))
    reader.close()
