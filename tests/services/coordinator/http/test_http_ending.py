"""A coordinator that ends while somebody reads events over HTTP."""

from __future__ import annotations

from pathlib import Path

from support.coordinators.event_readers import Reader, submit
from support.coordinators.harness import wait_for
from support.coordinators.http_places import HttpPlace
from support.servers.console_pages import PlainBrowser


def test_a_coordinator_that_ends_says_so(tmp_path: Path) -> None:
    with HttpPlace(tmp_path) as ending:
        reader = Reader(ending, submit(ending, "going"))
        events = reader.events()
        next(events)
    last = list(events)[-1]
    assert (last["event"], last["data"]["code"]) == ("failure", 14)  # browsers have an event `error` of their own
    reader.close()


def test_a_page_that_follows_an_export_holds_no_coordinator_up(tmp_path: Path) -> None:
    with HttpPlace(tmp_path) as ending:
        name = submit(ending, "looked-at")
        browser = PlainBrowser(ending.http_address)
        browser.post("/ui/sign-in", ("token", ending.tokens["viewer"]))
        assert browser.get(f"/ui/{name}").status == 200
        streams = ending.server._server._interceptors[0]._streams._open
        wait_for(lambda: streams["viewer"] == 1)


def test_it_says_so_to_those_who_watch_a_project(tmp_path: Path) -> None:
    with HttpPlace(tmp_path) as ending:
        reader = Reader(ending, "projects/red/exports")
        events = reader.events()
        assert next(events)["event"] == "bookmark"
    last = list(events)[-1]
    assert (last["event"], last["data"]["code"]) == ("failure", 14)
    reader.close()
