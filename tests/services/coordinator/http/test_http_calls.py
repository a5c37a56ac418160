"""Every call over HTTP, on a real coordinator: what it does, and that gRPC clients see the same."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from itertools import count
from typing import Any

import pytest

from support.coordinators.harness import wait_for
from support.coordinators.http_places import Answer, HttpPlace

NUMBERS = count()
CONTENT = b"0123456789abcdef" * 20_000


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def artifact(place: HttpPlace) -> str:
    """An artifact of red with one file, pushed over HTTP."""
    files = [{"path": "deep/one.bin", "sizeBytes": len(CONTENT), "digest": digest(CONTENT), "mediaType": "x/y"}]
    body = {"files": files}
    missing = place.call("submitter", "POST", "/v1/projects/red/artifacts", body)
    assert missing.status == 200
    assert missing.json["missing"] == [digest(CONTENT)]
    assert place.call("submitter", "PUT", f"/v1/projects/red/blobs/{digest(CONTENT)}", CONTENT).json == {}
    created = place.call("submitter", "POST", "/v1/projects/red/artifacts", body)
    assert created.json == {"digest": missing.json["digest"]}
    return str(created.json["digest"])


def create(place: HttpPlace, artifact: str, **fields: Any) -> Answer:
    body = {"exportId": f"e{next(NUMBERS)}", "sources": {"base": artifact, "adapter": artifact}, **fields}
    return place.call("submitter", "POST", "/v1/projects/red/exports", body)


def test_an_export_lives_over_http(place: HttpPlace, artifact: str) -> None:
    created = create(place, artifact, labels={"team": "Größe"}, priority=3, configuration={"formats": {"pytorch": {}}})
    assert created.status == 200, created.body
    export = created.json
    assert export["labels"] == {"team": "Größe"}
    assert export["creator"] == "submitter"
    assert export["priority"] == 3
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", export["createTime"])
    path = f"/v1/{export['name']}"
    read = place.call("viewer", "GET", path)
    assert read.json["name"] == export["name"]
    with place.client_of("submitter") as client:
        assert client.get_export(export["name"]).labels == {"team": "Größe"}
    wrong = place.call("submitter", "POST", f"{path}:cancel", {"etag": "another"})
    assert (wrong.status, wrong.reason) == (409, "ETAG_MISMATCH")
    assert place.call("submitter", "POST", f"{path}:cancel", {}).json["state"] in {
        "EXPORT_STATE_CANCELLING",
        "EXPORT_STATE_CANCELLED",
    }
    wait_for(lambda: place.call("viewer", "GET", path).json["state"] == "EXPORT_STATE_CANCELLED")
    again = place.call("submitter", "POST", f"{path}:retry")
    assert again.json["state"] in {"EXPORT_STATE_QUEUED", "EXPORT_STATE_RUNNING"}
    refused = place.call("admin", "DELETE", path)
    assert (refused.status, refused.reason) == (400, "EXPORT_STATE")
    place.call("submitter", "POST", f"{path}:cancel")
    wait_for(lambda: place.call("viewer", "GET", path).json["state"] == "EXPORT_STATE_CANCELLED")
    assert place.call("admin", "DELETE", path).json == {}
    gone = place.call("viewer", "GET", path)
    assert (gone.status, gone.reason, gone.json["code"]) == (404, "EXPORT_NOT_FOUND", 5)


def test_the_same_request_makes_one_export(place: HttpPlace, artifact: str) -> None:
    request = {"sources": {"base": artifact, "adapter": artifact}, "requestId": "once"}
    first, second = (place.call("submitter", "POST", "/v1/projects/red/exports", request) for _ in range(2))
    assert first.json["name"] == second.json["name"]
    other = place.call(
        "submitter",
        "POST",
        "/v1/projects/red/exports",
        {**request, "configuration": {"validation": {"enabled": False}}},
    )
    assert (other.status, other.reason) == (409, "EXPORT_EXISTS")


def test_names_are_those_of_json_or_of_the_protos(place: HttpPlace, artifact: str) -> None:
    body = {"validate_only": True, "sources": {"base": artifact, "adapter": artifact}, "export_id": "snake"}
    assert (
        place.call("submitter", "POST", "/v1/projects/red/exports", body).json["name"] == "projects/red/exports/snake"
    )
    assert place.call("viewer", "GET", "/v1/projects/red/exports/snake").status == 404
    assert place.call("viewer", "GET", "/v1/projects/red/exports?page_size=1").status == 200
    twice = place.call("viewer", "GET", "/v1/projects/red/exports?page_size=1&pageSize=1")
    assert (twice.status, twice.fields) == (400, ["pageSize"])


def test_lists_go_page_by_page(place: HttpPlace, artifact: str) -> None:
    names = {create(place, artifact, labels={"of": "pages"}).json["name"] for _ in range(3)}
    where = '/v1/projects/red/exports?view=EXPORT_VIEW_SUMMARY&pageSize=2&filter=label.of%3D"pages"'.replace('"', "%22")
    first = place.call("viewer", "GET", where).json
    second = place.call("viewer", "GET", f"{where}&pageToken={first['nextPageToken']}").json
    assert {each["name"] for each in first["exports"] + second["exports"]} == names
    assert "tasks" not in first["exports"][0]
    assert "nextPageToken" not in second
    wrong = place.call("viewer", "GET", "/v1/projects/red/exports?filter=nonsense")
    assert (wrong.status, wrong.fields) == (400, ["filter"])
    digests = place.call("viewer", "GET", "/v1/projects/red/artifacts?pageSize=1").json["digests"]
    assert digests == [artifact]


def test_an_artifact_is_listed_and_read(place: HttpPlace, artifact: str) -> None:
    listed = place.call("viewer", "GET", f"/v1/projects/red/artifacts/{artifact}").json
    assert listed["files"] == [
        {"path": "deep/one.bin", "sizeBytes": str(len(CONTENT)), "digest": digest(CONTENT), "mediaType": "x/y"}
    ]
    path = f"/v1/projects/red/artifacts/{artifact}/blobs/{digest(CONTENT)}"
    whole = place.call("viewer", "GET", path)
    assert (whole.status, whole.body) == (200, CONTENT)
    assert whole.headers["content-length"] == str(len(CONTENT))
    assert whole.headers["accept-ranges"] == "bytes"


def test_content_is_read_from_a_byte(place: HttpPlace, artifact: str) -> None:
    path, size = f"/v1/projects/red/artifacts/{artifact}/blobs/{digest(CONTENT)}", len(CONTENT)
    rest = place.call("viewer", "GET", path, range="bytes=100000-")
    assert (rest.status, rest.body) == (206, CONTENT[100_000:])
    assert rest.headers["content-range"] == f"bytes 100000-{size - 1}/{size}"
    assert place.call("viewer", "GET", f"{path}?offset=100000").body == CONTENT[100_000:]
    for beyond in (size, size + 1):
        refused = place.call("viewer", "GET", path, range=f"bytes={beyond}-")
        assert (refused.status, refused.headers["content-range"]) == (416, f"bytes */{size}")
    for both in (f"{path}?offset=5", f"{path}?offset={size + 1}"):
        refused = place.call("viewer", "GET", both, range="bytes=1-")
        assert (refused.status, refused.fields) == (400, ["offset"])
    missing = place.call("viewer", "GET", path.replace(digest(CONTENT), "sha256:short"), range="bytes=1-")
    assert missing.status == 404
    for first, last, end in ((0, 0, 1), (5, 9, 10), (100_000, size - 1, size), (size - 1, size + 5, size)):
        part = place.call("viewer", "GET", path, range=f"bytes={first}-{last}")
        assert (part.status, part.body) == (206, CONTENT[first:end])
        assert part.headers["content-range"] == f"bytes {first}-{end - 1}/{size}"
        assert part.headers["content-length"] == str(end - first)
    assert place.call("viewer", "HEAD", path, range="bytes=5-9").headers["content-length"] == "5"
    refused = place.call("viewer", "GET", path, range=f"bytes={size}-{size + 9}")
    assert (refused.status, refused.headers["content-range"]) == (416, f"bytes */{size}")
    refused = place.call("viewer", "GET", f"{path}?limit=5", range="bytes=1-")
    assert (refused.status, refused.fields) == (400, ["limit"])
    assert place.call("viewer", "GET", f"{path}?offset=5&limit=4").body == CONTENT[5:9]
    changed = place.call("viewer", "GET", path, **{"range": "bytes=5-9", "if-range": '"an earlier one"'})
    assert (changed.status, len(changed.body)) == (200, size)
    part = place.call("viewer", "GET", f"{path}?offset=5")
    assert "accept-ranges" not in part.headers  # a range would be of the whole
    assert place.call("viewer", "GET", f"{path}?offset={size + 1}").status == 400
    for other in (
        "bytes=2-1",
        "bytes=-5",
        "bytes=1-,3-",
        "lines=1-",
        "bytes=" + "9" * 400 + "-",
    ):  # all of it is right, too
        whole = place.call("viewer", "GET", path, range=other)
        assert (whole.status, len(whole.body)) == (200, size)


def test_a_head_is_that_of_the_response(place: HttpPlace, artifact: str) -> None:
    listed = f"/v1/projects/red/artifacts/{artifact}"
    for path in (listed, f"{listed}/blobs/{digest(CONTENT)}"):
        head, whole = (place.call("viewer", verb, path) for verb in ("HEAD", "GET"))
        assert (head.status, head.headers["content-length"], head.body) == (200, str(len(whole.body)), b"")
        again = http.client.HTTPConnection(place.http_address, timeout=60)
        for _ in range(3):  # over one connection
            again.request("HEAD", path, headers={"authorization": f"Bearer {place.tokens['viewer']}"})
            assert again.getresponse().read() == b""
            assert again.sock is not None
        again.close()
    assert place.call("viewer", "HEAD", "/v1/projects/red/exports/none").status == 404
    refused = place.call("viewer", "HEAD", "/v1/projects/red/exports/none:cancel")
    assert (refused.status, refused.headers["allow"]) == (405, "POST")


def test_wrong_content_is_refused(place: HttpPlace) -> None:
    path = f"/v1/projects/red/blobs/{digest(b'right')}"
    wrong = place.call("submitter", "PUT", path, b"wrong")
    assert (wrong.status, wrong.json["code"]) == (400, 3)
    short = place.call("submitter", "PUT", f"{path}?sizeBytes=9", b"right")
    assert short.status == 400
    beyond = place.call("submitter", "PUT", f"{path}?sizeBytes=5&offset=6", b"")
    assert (beyond.status, beyond.fields) == (400, ["offset"])
    lost = place.call("submitter", "PUT", f"{path}?sizeBytes=5&offset=2", b"ght")
    assert (lost.status, lost.reason) == (503, "UPLOAD_LOST")
    assert place.call("submitter", "GET", f"/v1/projects/red/uploads/{digest(b'right')}").json == {"offset": "5"}
    assert place.call("submitter", "PUT", path, b"right").json == {}


def test_an_upload_goes_on(place: HttpPlace) -> None:
    content = b"goes on" * 100_000
    path = f"/v1/projects/red/blobs/{digest(content)}"
    half = place.call("submitter", "PUT", f"{path}?sizeBytes={len(content)}", content[:350_000])
    assert half.status == 400  # it ended before its size
    kept = int(place.call("submitter", "GET", f"/v1/projects/red/uploads/{digest(content)}").json.get("offset", 0))
    assert kept == 350_000
    assert place.call("submitter", "PUT", f"{path}?offset={kept}", content[kept:]).json == {}


def test_a_list_of_all_projects_is_of_those_that_the_caller_may_see(place: HttpPlace, artifact: str) -> None:
    create(place, artifact)
    for who, seen in (
        ("admin", True),
        ("submitter", True),
        ("viewer", True),
        ("neighbour", False),
        ("keyholder", False),
    ):
        assert bool(place.call(who, "GET", "/v1/projects/-/exports").json.get("exports")) is seen, who
    for who in ("admin", "submitter"):
        assert place.call(who, "POST", "/v1/projects/-/exports", {}).fields == ["parent"]
        assert place.call(who, "POST", "/v1/projects/-/artifacts", {}).fields == ["parent"]
    assert artifact in place.call("admin", "GET", "/v1/projects/-/artifacts").json["digests"]
    # A list that looks complete would cost others their artifacts: what is not in it is removed.
    partial = place.call("submitter", "GET", "/v1/projects/-/artifacts")
    assert (partial.status, partial.reason) == (403, "PERMISSION_DENIED")
    refused = place.call("submitter", "GET", "/v1/projects/-/exports/e1")
    assert (refused.status, refused.reason) == (404, "EXPORT_NOT_FOUND")


def test_a_list_has_an_order(place: HttpPlace, artifact: str) -> None:
    names = [create(place, artifact, labels={"of": "order"}).json["name"] for _ in range(3)]
    where = "/v1/projects/red/exports?pageSize=2&filter=label.of%3Dorder&orderBy="
    newest = place.call("viewer", "GET", f"{where}create_time%20desc").json
    assert [export["name"] for export in newest["exports"]] == names[:0:-1]
    oldest = place.call("viewer", "GET", f"{where}create_time").json
    rest = place.call("viewer", "GET", f"{where}create_time&pageToken={oldest['nextPageToken']}").json
    assert [export["name"] for export in oldest["exports"] + rest["exports"]] == names
    other = place.call("viewer", "GET", f"{where}&pageToken={oldest['nextPageToken']}")
    assert (other.status, other.fields) == (400, ["page_token"])
    assert place.call("viewer", "GET", f"{where}name").fields == ["order_by"]


def test_the_server_says_that_it_serves_and_what_it_takes(place: HttpPlace) -> None:
    assert place.call("", "GET", "/healthz").json == {"status": "SERVING"}
    described = place.call("", "GET", "/openapi.json").json
    assert described["openapi"] == "3.1.0"
    assert place.call("", "POST", "/healthz", b"").status == 405


def test_json_has_no_line_breaks_or_secrets_of_the_caller(place: HttpPlace) -> None:
    refused = place.call("submitter", "POST", "/v1/projects/red/exports", {"priority": "\x1b[31mred"})
    assert refused.fields == ["priority"]
    assert b"\\u001b" not in refused.body
    assert b"red" not in refused.body
    unknown = place.call("not-a-token-that-anybody-has", "GET", "/v1/projects/red/exports")
    assert (unknown.status, unknown.headers["www-authenticate"]) == (401, "Bearer")
    assert b"not-a-token" not in json.dumps(unknown.json).encode()
