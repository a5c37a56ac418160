"""Who may call what over HTTP: as over gRPC, by the same rules, limits and audit log."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2

from slipway.client.calls import BlockingCalls
from slipway_coordinator.http.application import SERVICES
from slipway_coordinator.http.routes import Route, Routes
from support.coordinators.http_places import HttpPlace

DIGEST = "sha256:" + hashlib.sha256(b"never uploaded").hexdigest()
ROUTES = Routes(*SERVICES).calls
CALLERS = ("", "viewer", "submitter", "neighbour", "admin", "keyholder")
VALUES = {
    "name=projects/*/exports/*": "projects/red/exports/none",
    "name=projects/*/artifacts/*": f"projects/red/artifacts/{DIGEST}",
}


def path_of(route: Route) -> tuple[str, dict[str, str]]:
    """Return a path of a call, and the values of its fields."""
    path, values = route.rule.template, dict[str, str]()
    for variable, template in route.rule.variables.items():
        value = DIGEST if template == "*" else VALUES.get(f"{variable}={template}", "projects/red")
        written = f"{{{variable}}}" if template == "*" else f"{{{variable}={template}}}"
        path, values[variable] = path.replace(written, value), value
    return path, values


def over_grpc(place: HttpPlace, who: str, route: Route, values: dict[str, str]) -> str:
    """Make the same call over gRPC; return the name of its code."""
    with grpc.insecure_channel(place.address) as channel:
        metadata = [("authorization", f"Bearer {place.tokens[who]}")] if who else []
        request = GetMessageClass(route.request)(**values)
        make: Any = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
        }[route.streams_requests, route.streams_responses]
        call = make(route.method, type(request).SerializeToString, lambda data: data)
        try:
            answer = call(iter([request]) if route.streams_requests else request, metadata=metadata, timeout=60)
            if route.streams_responses:
                list(answer)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


ENDLESS = "/slipway.v1.ExportService/WatchExports"
"""Its stream has a test of its own."""


@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if route.method != ENDLESS],
    ids=lambda route: route.method.rpartition("/")[2],
)
def test_each_call_is_for_the_same_callers(place: HttpPlace, route: Route) -> None:
    compare(place, route, *path_of(route))
    path, values = path_of(route)
    if values.get("parent") == "projects/red":
        compare(place, route, path.replace("projects/red", "projects/-", 1), {**values, "parent": "projects/-"})


def compare(place: HttpPlace, route: Route, path: str, values: dict[str, str]) -> None:
    """Compare the codes of a call over HTTP and gRPC, for each caller."""
    body = {"PUT": b"", "POST": {}}.get(route.rule.verb)
    for who in CALLERS:
        answer = place.call(who, route.rule.verb, path, body)
        code = "OK" if answer.status == 200 else code_pb2.Code.Name(answer.json["code"])
        assert code == over_grpc(place, who, route, values), (who, answer.body)


def test_every_public_call_has_a_path() -> None:
    assert len(ROUTES) == 19
    assert {route.method.split("/")[1] for route in ROUTES} == set(SERVICES)
    assert len({(route.rule.verb, route.rule.template) for route in ROUTES}) == 19


def test_what_is_changed_over_http_is_in_the_audit_log(place: HttpPlace, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "slipway.audit"):
        place.call("viewer", "POST", "/v1/projects/red/exports/none:cancel")
        place.call("admin", "DELETE", "/v1/projects/red/exports/none")
        place.call("", "DELETE", "/v1/projects/red/exports/none")
        place.call("submitter", "POST", "/v1/projects/red/exports", b"{", content_type="application/json")
    lines = [record.audit for record in caplog.records if record.name == "slipway.audit"]  # type: ignore[attr-defined]
    assert [(line["action"], line["outcome"], line["principal"]) for line in lines] == [
        ("CancelExport", "PERMISSION_DENIED", "viewer"),
        ("DeleteExport", "done", "admin"),
        ("DeleteExport", "UNAUTHENTICATED", ""),
        ("CreateExport", "REQUEST_INVALID", "submitter"),
    ]
    assert lines[1]["resource"] == "projects/red/exports/none"
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in lines)


def test_limits_of_texts_are_those_of_grpc(place: HttpPlace) -> None:
    long = place.call("viewer", "GET", f"/v1/projects/red/exports?pageToken={'a' * 300}")
    assert (long.status, long.reason) == (429, "LIMIT_EXCEEDED")
    labels = {f"l{number}": "x" for number in range(65)}
    many = place.call("submitter", "POST", "/v1/projects/red/exports", {"labels": labels})
    assert (many.status, many.reason, many.info["metadata"]["field"]) == (429, "LIMIT_EXCEEDED", "labels")


def test_a_page_of_another_site_cannot_call(place: HttpPlace) -> None:
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ):
        refused = place.call("submitter", "GET", "/v1/projects/red/exports", **headers)
        assert (refused.status, refused.reason) == (403, "PERMISSION_DENIED"), headers
    same = {"origin": f"http://{place.http_address}", "sec-fetch-site": "same-origin"}
    assert place.call("submitter", "GET", "/v1/projects/red/exports", **same).status == 200
    proxied = {
        "host": "slipway.example",
        "origin": "https://slipway.example",
    }  # a token says who calls, whatever the name
    assert place.call("submitter", "GET", "/v1/projects/red/exports", **proxied).status == 200
    text = place.call("submitter", "POST", "/v1/projects/red/exports", b"{}", content_type="text/plain")
    assert text.status == 415


def test_requests_are_the_messages_of_the_protos(place: HttpPlace, tmp_path: Path) -> None:
    """What json_format writes of a response is what a client of the protos reads."""
    with place.client_of("submitter") as client:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").write_text("text")
        digest = client.push_artifact(tmp_path / "folder")
        calls: BlockingCalls = client._calls
        assert calls is not None
        expected = client.get_artifact(digest)
    answer = place.call("viewer", "GET", f"/v1/projects/red/artifacts/{digest}")
    assert json_format.Parse(answer.body, type(expected)()) == expected
