"""The console of a coordinator: who signs in, what each caller sees and may do, and that its calls take the way of all others."""

from __future__ import annotations

import io
import logging
import re
import tarfile
from pathlib import Path
from urllib.parse import unquote

import pytest

from slipway.console import at_coordinator
from slipway_coordinator.lifecycle.records import ExportState, TaskState
from support.coordinators.artifact_places import content, some_files
from support.coordinators.event_readers import submit
from support.coordinators.harness import tiny_export, tiny_task, wait_for
from support.coordinators.http_places import HttpPlace
from support.servers.console_pages import PlainBrowser

DIGEST = "sha256:" + "1" * 64
WAITING = re.compile("The export (waits|is running)")


@pytest.fixture
def nobody(place: HttpPlace) -> PlainBrowser:
    return PlainBrowser(place.http_address)


def signed_in(place: HttpPlace, who: str) -> PlainBrowser:
    browser = PlainBrowser(place.http_address)
    answer = browser.post("/ui/sign-in", ("token", place.tokens[who]), ("next", "/ui/"))
    assert (answer.status, answer.location) == (303, "/ui/")
    return browser


def path_of(name: str) -> str:
    return f"/ui/{name}"


def test_who_has_not_signed_in_is_led_there_and_back(place: HttpPlace, nobody: PlainBrowser) -> None:
    name = submit(place, "wanted")
    led = nobody.get(path_of(name))
    assert (led.status, led.location) == (303, f"/ui/sign-in?next={path_of(name)}")
    page = nobody.get(led.location)
    assert page.status == 200
    assert f'name="next" value="{path_of(name)}"' in page.text
    answer = nobody.post("/ui/sign-in", ("token", f" {place.tokens['viewer']}\n"), ("next", path_of(name)))
    assert (answer.status, answer.location) == (303, path_of(name))
    cookie = answer.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/ui"))
    assert "wanted" in nobody.get(path_of(name)).text
    part = PlainBrowser(place.http_address).get(f"{path_of(name)}/live", hx_request="true")
    assert part.status == 200
    shown = f"http://{place.http_address}/ui/compare?export=red/wanted&export=red/other"
    part = PlainBrowser(place.http_address).get(f"{path_of(name)}/live", hx_request="true", hx_current_url=shown)
    assert unquote(part.headers["hx-redirect"]) == "/ui/sign-in?next=/ui/compare?export=red/wanted&export=red/other"
    led = PlainBrowser(place.http_address).get("/ui/compare?export=red/wanted&export=red/other")
    assert unquote(led.location) == "/ui/sign-in?next=/ui/compare?export=red/wanted&export=red/other"


@pytest.mark.parametrize("token", ["", "wrong", "a" * 40, "sl-" + "0" * 60, "\x00\x1b", "ümläut" * 10, "a" * 9000])
def test_a_token_that_is_none_of_anybody_is_refused(nobody: PlainBrowser, token: str) -> None:
    answer = nobody.post("/ui/sign-in", ("token", token), ("next", "/ui/"))
    assert (answer.status, "UNAUTHENTICATED" in answer.text) == (401, True)
    assert "--token-file" not in answer.text, "a browser has no flags"
    assert not nobody.cookies


@pytest.mark.parametrize(
    "where",
    [
        "https://evil.example/",
        "//evil.example",
        "/ui//evil.example",
        "/v1/exports",
        "/ui/sign-out",
        "/ui/\\evil",
        "/ui/\n",
    ],
)
def test_signing_in_leads_nowhere_else(place: HttpPlace, nobody: PlainBrowser, where: str) -> None:
    answer = nobody.post("/ui/sign-in", ("token", place.tokens["viewer"]), ("next", where))
    assert (answer.status, answer.location) == (303, "/ui/")


def test_signing_out_forgets_the_token(place: HttpPlace) -> None:
    browser = signed_in(place, "viewer")
    assert browser.post("/ui/sign-out").location == "/ui/sign-in"
    assert not browser.cookies["slipway-token"].strip('"')
    assert browser.get("/ui/").status == 303


def test_three_users_see_what_is_theirs(place: HttpPlace) -> None:
    red = submit(place, "of-red")
    place.submit(tiny_export("of-default", tiny_task("merge")))
    seen = {who: signed_in(place, who).get("/ui/").text for who in ("viewer", "neighbour", "admin")}
    assert ["of-red" in seen[who] for who in seen] == [True, False, True]
    assert ["of-default" in seen[who] for who in seen] == [False, False, True]
    hidden = signed_in(place, "neighbour").get(path_of(red))
    assert (hidden.status, "EXPORT_NOT_FOUND" in hidden.text) == (404, True)
    for part in ("live", "report", "outputs/merge.tar"):
        assert signed_in(place, "neighbour").get(f"{path_of(red)}/{part}").status == 404
    assert signed_in(place, "neighbour").post(f"{path_of(red)}/cancel").status == 404


def test_who_may_only_look_changes_nothing(place: HttpPlace) -> None:
    name = submit(place, "looked-at")
    refused = signed_in(place, "viewer").post(f"{path_of(name)}/cancel")
    assert (refused.status, "PERMISSION_DENIED" in refused.text) == (403, True)
    fields = (("run", DIGEST), ("base", "s3://bucket/base"), ("formats", "gguf:q8_0"), ("project", "red"))
    refused = signed_in(place, "viewer").post("/ui/exports", *fields)
    assert (refused.status, "PERMISSION_DENIED" in refused.text) == (422, True)
    assert WAITING.search(signed_in(place, "viewer").get(path_of(name)).text)
    assert signed_in(place, "submitter").post(f"{path_of(name)}/cancel").status == 303
    assert "was cancelled" in signed_in(place, "viewer").get(path_of(name)).text
    assert signed_in(place, "admin").post(f"{path_of(name)}/delete").location == "/ui/"
    assert signed_in(place, "submitter").get(path_of(name)).status == 404


def test_an_export_is_created_of_what_was_pushed(place: HttpPlace, tmp_path: Path) -> None:
    browser = signed_in(place, "submitter")
    digest = place.client_of("submitter").push_artifact(some_files(tmp_path))
    fields = (("run", digest), ("base", digest), ("formats", "gguf:q8_0"), ("project", "red"))
    checked = browser.post("/ui/new/check", *fields, hx_trigger_name="formats")
    assert "Makes gguf-q8_0" in re.sub("<.*?>", "", checked.text), checked.text
    answer = browser.post("/ui/exports", *fields)
    assert re.fullmatch("/ui/projects/red/exports/[a-z0-9-]+", answer.location), answer.text
    page = browser.get(answer.location).text
    assert WAITING.search(page)
    assert "by <bdi>submitter</bdi>" in page
    assert (
        browser.post("/ui/exports", *fields, ("form", "1")).location
        == browser.post("/ui/exports", *fields, ("form", "1")).location
    )
    again = re.findall('/ui/new[?](run=[^"]*)', page)
    form = browser.get(f"/ui/new?{again[0]}").text
    assert f'value="{digest}"' in form
    assert 'id="project" name="project" value="red"' in form


def test_no_file_of_the_coordinator_is_read(place: HttpPlace) -> None:
    browser = signed_in(place, "submitter")
    for run, base in (("/etc", DIGEST), (DIGEST, "/etc"), ("~", ""), ("", "relative")):
        for path in ("/ui/new/check", "/ui/exports"):
            refused = browser.post(path, ("run", run), ("base", base), ("target", "cpu-server"), ("project", "red"))
            assert "SOURCE_NOT_ALLOWED" in refused.text, (run, base, path)


def test_an_output_is_downloaded_with_the_rights_of_its_reader(place: HttpPlace, tmp_path: Path) -> None:
    folder = some_files(tmp_path)
    digest = place.client_of("submitter").push_artifact(folder)
    record = tiny_export("with-output", tiny_task("pytorch"))
    name = "projects/red/exports/with-output"
    task = record.tasks[0].model_copy(update={"state": TaskState.SUCCEEDED, "outputs": {"out": digest}})
    ended = record.model_copy(
        update={
            "name": name,
            "state": ExportState.SUCCEEDED,
            "tasks": (task,),
            "outputs": {"pytorch": digest},
            "end_time": record.create_time,
        }
    )
    place.submit(ended)
    browser = signed_in(place, "viewer")
    data = browser.get(f"{path_of(name)}/outputs/pytorch.tar")
    assert data.status == 200
    assert data.headers["content-length"] == str(len(data.body))
    with tarfile.open(fileobj=io.BytesIO(data.body)) as archive:
        found = {each.name.removeprefix("pytorch/"): archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]
    assert found == content(folder)


def test_pages_of_other_sites_make_no_call(place: HttpPlace) -> None:
    name = submit(place, "wanted-by-others")
    browser = signed_in(place, "submitter")
    for headers in ({"origin": "https://evil.example"}, {"sec_fetch_site": "cross-site"}, {"origin": "null"}):
        assert browser.post(f"{path_of(name)}/cancel", **headers).status == 403, headers
    assert WAITING.search(browser.get(path_of(name)).text)


def test_the_cookie_opens_the_pages_alone(place: HttpPlace) -> None:
    browser = signed_in(place, "viewer")
    cookie = f"slipway-token={place.tokens['viewer']}"
    assert browser.get("/v1/projects/red/exports", cookie=cookie).status == 401


def test_a_proxy_may_send_the_token_as_a_header(place: HttpPlace, nobody: PlainBrowser) -> None:
    page = nobody.get("/ui/", authorization=f"Bearer {place.tokens['viewer']}")
    assert page.status == 200
    browser = signed_in(place, "admin")
    assert browser.get("/ui/machines", authorization="Bearer wrong").status == 303


def test_calls_are_audited_with_the_address_of_the_browser(place: HttpPlace, caplog: pytest.LogCaptureFixture) -> None:
    name = submit(place, "audited")
    with caplog.at_level(logging.INFO, "slipway.audit"):
        signed_in(place, "submitter").post(f"{path_of(name)}/cancel")
    said = [record.getMessage() for record in caplog.records if "CancelExport" in record.getMessage()]
    assert said
    assert "submitter" in said[0]
    assert "127.0.0.1" in said[0]
    assert not [record for record in caplog.records if place.tokens["submitter"] in record.getMessage()]


def test_progress_is_followed_while_somebody_looks(place: HttpPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_coordinator, "_UNWATCHED_SECONDS", 0.3)
    name = submit(place, "followed")
    browser = signed_in(place, "guest")
    streams = place.server._server._interceptors[0]._streams._open
    for _ in range(3):
        browser.get(path_of(name))
        wait_for(lambda: streams["guest"])
        assert streams["guest"] == 1, "each look opens a stream of its own"
    wait_for(lambda: not streams["guest"])  # nobody looks, and nothing happens to the export
    signed_in(place, "submitter").post(f"{path_of(name)}/cancel")
    assert browser.get(f"{path_of(name)}/live?state=queued").headers["hx-refresh"] == "true"


def test_the_machines_are_those_that_the_caller_may_see(place: HttpPlace) -> None:
    submit(place, "waits-for-a-worker")
    page = signed_in(place, "admin").get("/ui/machines").text
    assert "There is no worker" in page
    assert "What waits" in page
    offered = signed_in(place, "submitter").get("/ui/new").text
    assert "no live worker" in offered.lower() or "disabled" in offered
