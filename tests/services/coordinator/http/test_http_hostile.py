"""Requests that no honest client sends: each is refused with a typed error, and the next request is served."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Iterator

import pytest

from slipway_coordinator.http import listener
from support.coordinators.http_places import HttpPlace

EXPORTS = "/v1/projects/red/exports"


@pytest.fixture(autouse=True)
def served(place: HttpPlace, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert place.call("viewer", "GET", EXPORTS).status == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"priority": NaN}',
        b'{"priority": Infinity}',
        b'{"priority": 1e400}',
        b'{"priority": 1, "priority": 2}',
        b'{"priority": ' + b"9" * 5000 + b"}",
        b'{"labels": {"a": "\\ud800"}}',
        b'{"configuration": ' + b'{"formats": ' * 100_000 + b"}" * 100_000 + b"}",
        b"[" * 200_000,
        b'{"labels": {"a": null}}',
        b'{"labels": ["a"]}',
        b'{"configuration": {"checkpoint": []}}',
        b'{"configuration": {"formats": {"onnx": {"settings": {"a": ' + b"[" * 60 + b"]" * 60 + b"}}}}}",
        b'{"parent": "projects/blue"}',
        b'{"exportId": "../../blue/exports/x"}',
        b'{"exportId": "a", "export_id": "b"}',
        b'{"sources": {"base": 5}}',
        b'{"priority": 1.5}',
        b'{"priority": 99999999999}',
        b'{"validateOnly": "yes"}',
        b'{"unknown\\u001b[31m": 1}',
    ],
    ids=lambda body: body[:30].decode("latin-1"),
)
def test_a_body_that_is_no_request_is_refused(place: HttpPlace, body: bytes) -> None:
    refused = place.call("submitter", "POST", EXPORTS, body, content_type="application/json")
    assert refused.status in {400, 413, 429}, refused.body
    assert refused.reason in {"REQUEST_INVALID", "LIMIT_EXCEEDED", "CONFIGURATION_INVALID"}
    assert "\x1b" not in str(refused.info) + refused.json["message"]
    assert len(refused.body) < 8000


def test_a_field_is_named_where_it_stands(place: HttpPlace) -> None:
    for body, field in (
        ({"configuration": {"validation": {"enabled": 5}}}, "configuration.validation.enabled"),
        ({"configuration": {"formats": {"onnx": {"opset": {}}}}}, "configuration.formats[onnx].opset"),
        ({"labels": {"team": 5}}, "labels"),
        ({"configuration": {"formats": {"onnx": {"enabled": 1}}}}, "configuration.formats[onnx].enabled"),
        ({"configuration": {"combination": {"weights": [1, "x"]}}}, "configuration.combination.weights[1]"),
        ({"configuration": {"formats": {"a b\x1b": {"enabled": 1}}}}, "configuration.formats"),
        ({"priority": "x"}, "priority"),
        ({"nothing": 1}, "nothing"),
    ):
        refused = place.call("submitter", "POST", EXPORTS, body)
        assert (refused.status, refused.fields) == (400, [field]), refused.body


def test_a_body_beyond_its_limit_is_not_read(place: HttpPlace) -> None:
    large = b'{"labels": {"a": "' + b"x" * (2 << 20) + b'"}}'
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        refused = place.call("submitter", "POST", EXPORTS, large, content_type="application/json")
        assert (refused.status, refused.reason) == (413, "LIMIT_EXCEEDED")
    nobody = exchange(
        place,
        b"POST /v1/projects/red/exports HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 999999999\r\nExpect: 100-continue\r\n\r\n",
    )
    assert nobody.startswith(b"HTTP/1.1 401")  # before it has sent anything
    assert b"100 Continue" not in nobody


@pytest.mark.parametrize("who", ["viewer", "neighbour"])
def test_a_body_of_a_caller_who_may_not_call_is_not_parsed(place: HttpPlace, who: str) -> None:
    refused = place.call(who, "POST", EXPORTS, b"{", content_type="application/json")
    assert (refused.status, refused.reason) == (403, "PERMISSION_DENIED")
    hidden = place.call("neighbour", "POST", f"{EXPORTS}/x:cancel", b"{", content_type="application/json")
    assert (hidden.status, hidden.reason) == (404, "EXPORT_NOT_FOUND")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/projects/red/exports/%2e%2e%2fblue",
        "/v1/projects/red/exports/..",
        "/v1/projects/red%2F..%2Fblue/exports",
        "/v1/projects/red/exports/a%00b",
        "/v1/projects/red/exports/%ff",
        "/v1/projects//exports",
        "/v1/projects/red/exports/" + "a" * 3000,
        "/v1/projects/red/artifacts/sha256:short",
        "/v1/../etc/passwd",
        "//v1/projects/red/exports",
        "/v1/projects/red/exports?filter=%ff",
        "/v1/projects/red/exports?" + "&".join("pageSize=1" for _ in range(100)),
        "/v1/projects/red/exports?pageSize=1.5",
        "/v1/projects/red/exports?pageSize=99999999999",
        "/v1/projects/red/exports?view=NOTHING",
        "/v1/projects/red/exports?view=77",
        "/v1/projects/red/exports?parent=projects/blue",
        "/v1/projects/red/exports/x:watch?afterSequence=-",
        "/v1/projects/red/exports/x:unknown",
    ],
)
def test_a_path_that_names_nothing_is_refused(place: HttpPlace, path: str) -> None:
    refused = place.call("submitter", "GET", path)
    assert refused.status in {400, 404, 429}, refused.body
    assert refused.reason in {"REQUEST_INVALID", "LIMIT_EXCEEDED", "CALL_NOT_FOUND", "EXPORT_NOT_FOUND"}


@pytest.mark.parametrize("offset", ["9223372036854775807", "9223372036854775808", "-1", "x", "1e99"])
def test_an_offset_that_no_content_has_is_refused(place: HttpPlace, offset: str) -> None:
    path = f"/v1/projects/red/blobs/sha256:{'0' * 64}?offset={offset}"
    refused = place.call("submitter", "PUT", path, b"bytes")
    assert refused.status in {400, 429, 503}, refused.body
    assert refused.reason in {"REQUEST_INVALID", "LIMIT_EXCEEDED", "UPLOAD_LOST"}


def exchange(place: HttpPlace, data: bytes, *, seconds: float = 20.0) -> bytes:
    """Send bytes as they are; return what comes back until the end, or until nothing has come for a while."""
    host, _, port = place.http_address.partition(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(data)
        received = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while b"\r\n\r\n" not in received and (part := connection.recv(65536)):
                received += part
        return received


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /v1/projects/red/exports HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /v1/projects/red/exports HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/projects/red/exports HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=lambda data: data[:20].decode("latin-1") + str(len(data)),
)
def test_what_is_no_http_is_answered_by_the_library(place: HttpPlace, data: bytes) -> None:
    received = exchange(place, data)
    assert received == b"" or received.split(b" ")[1][:1] in {b"4", b"5"}, received


def test_two_tokens_are_none(place: HttpPlace) -> None:
    tokens = b"".join(f"Authorization: Bearer {place.tokens[who]}\r\n".encode() for who in ("viewer", "submitter"))
    received = exchange(place, b"GET /v1/projects/red/exports HTTP/1.1\r\nHost: localhost\r\n" + tokens + b"\r\n")
    assert received.startswith(b"HTTP/1.1 401")


def test_a_head_that_drips_ends(place: HttpPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_HEADER_SECONDS", 1.0)
    host, _, port = place.http_address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        began = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for byte in b"GET /v1/projects/red/exports HTTP/1.1\r\nX-Slow: " + b"y" * 600:
                connection.sendall(bytes([byte]))
                time.sleep(0.1)
        assert time.monotonic() - began < 50


def test_a_slow_reader_gets_all_of_its_response(place: HttpPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"0123456789abcdef" * (1 << 18)
    name = "sha256:" + hashlib.sha256(content).hexdigest()
    files = {"files": [{"path": "large", "sizeBytes": len(content), "digest": name}]}
    assert place.call("submitter", "PUT", f"/v1/projects/red/blobs/{name}", content).status == 200
    artifact = place.call("submitter", "POST", "/v1/projects/red/artifacts", files).json["digest"]
    path = f"/v1/projects/red/artifacts/{artifact}/blobs/{name}"
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {place.tokens['viewer']}\r\n\r\n"
    monkeypatch.setattr(listener, "_HEADER_SECONDS", 0.5)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", place.server.http_port))
        connection.sendall(head.encode())
        received = b""
        while part := connection.recv(1 << 15):  # until the connection ends, as it is idle then
            received += part
            time.sleep(0.02)
    assert received.partition(b"\r\n\r\n")[2] == content


def test_one_host_does_not_take_all_connections(place: HttpPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_MOST_OF_A_HOST", 3)
    host, _, port = place.http_address.partition(":")
    with contextlib.ExitStack() as closing:
        held = [closing.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(5)]
        ended = 0
        for connection in held[3:]:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            ended += 1
        assert ended == 2
