"""WatchExports where it ends or is resumed: restarts, old cursors, tokens that end, rights that change; each with a coordinator of its own."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from slipway.client import AsyncClient
from slipway.errors import ModelExportError
from slipway.security.access.principals import token_hash
from slipway.security.limits import Limits
from slipway_coordinator.storage import changes as changes_module
from slipway_coordinator.workflow import feed as feed_module
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.artifact_places import Place
from support.coordinators.event_readers import Told, submit_to, take, told
from support.coordinators.harness import Harness, tiny_export, tiny_task, wait_for


def test_a_cursor_that_is_too_old_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "CHANGES_KEPT", 4)
    monkeypatch.setattr(changes_module, "_FORGET_EVERY", 1)
    with Harness(tmp_path, with_worker=False) as harness:
        with closing(harness.client.watch_exports()) as events:
            cursor = next(events).cursor
        for number in range(4):
            harness.submit(tiny_export(f"x{number}", tiny_task("a")))
        wait_for(lambda: all(each.state == pb.EXPORT_STATE_RUNNING for each in harness.client.list_exports()))
        with pytest.raises(ModelExportError) as caught:
            next(harness.client.watch_exports(cursor=cursor))
        assert caught.value.reason == "CURSOR_EXPIRED"
        assert "list the exports" in caught.value.remedy


@pytest.mark.parametrize("in_memory", [1, 1000])
def test_a_watch_goes_on_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    monkeypatch.setattr(feed_module, "IN_MEMORY", in_memory)
    seen: list[Told] = []
    with Harness(tmp_path, with_worker=False) as harness:
        with closing(harness.client.watch_exports()) as events:
            next(events)
            harness.submit(tiny_export("x", tiny_task("a")))
            event = next(events)
            seen.append(told(event))
        events = harness.client.watch_exports(cursor=event.cursor, patience_seconds=0)
        seen += map(told, take(events, 2)[1:])
    with pytest.raises(ModelExportError) as caught:  # it ends with the coordinator
        next(events)
    assert caught.value.reason in {"CANCELLED", "COORDINATOR_UNAVAILABLE"}
    with Harness(tmp_path, with_worker=False) as harness:
        harness.submit(tiny_export("y", tiny_task("a")))
        harness.client.cancel_export("x")
        with closing(harness.client.watch_exports(cursor=event.cursor)) as events:
            next(events)
            assert told(next(events)) == seen[-1]
            rest = sorted(map(told, take(events, 3)))
    assert seen == [("created", "default/exports/x", "queued"), ("state_changed", "default/exports/x", "running")]
    assert rest == [
        ("created", "default/exports/y", "queued"),
        ("state_changed", "default/exports/x", "cancelled"),
        ("state_changed", "default/exports/y", "running"),
    ]


def test_progress_comes_only_if_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_PROGRESS_SECONDS", 0.05)
    stop = tmp_path / "stop"
    with (
        Harness(tmp_path) as harness,
        closing(harness.client.watch_exports(include_progress=True)) as asks,
        closing(harness.client.watch_exports()) as other,
    ):
        next(asks)
        next(other)
        record = tiny_export("x", tiny_task("a", sleep_seconds=60.0, unless=str(stop)), base=harness.base())
        harness.submit(record)
        for event in asks:
            if event.WhichOneof("event") == "progress":
                assert event.progress.export == "projects/default/exports/x"
                assert event.progress.progress.task == "a"
                if event.progress.progress.phase == "sleeping":
                    break
        stop.touch()
        rest = [told(event) for event in itertools.takewhile(lambda one: told(one)[2] != "succeeded", asks)]
        assert {kind for kind, *_ in rest} <= {"progress", "bookmark"}
        *_, last = seen = take(other, 3)
        assert [told(event)[0] for event in seen] == ["created", "state_changed", "state_changed"]
        assert last.change.export.outputs, "what was delivered"


def test_a_watch_ends_with_the_token_and_when_rights_change(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.security is not None
    place.security = _with(place.security, recheck_seconds=0.2)
    access = tmp_path / "access.yaml"
    with place, place.client_of("viewer") as viewer:
        entries = yaml.safe_load(access.read_text())["principals"]

        def rewrite(**changed: Any) -> None:
            people = [entry | changed if entry["name"] == "viewer" else entry for entry in entries]
            access.write_text(yaml.safe_dump({"principals": people}))

        with closing(viewer.watch_exports(project="-")) as events:
            next(events)
            rewrite(projects=["red", "blue"])
            assert told(next(events))[0] == "bookmark", "the client has called again"
            name = submit_to(place, "blue", "new")
            assert told(next(events)) == ("created", name.removeprefix("projects/"), "queued")
            assert told(next(events))[2] == "running"
            rewrite(token_sha256=token_hash("slipway_another-token"))
            with pytest.raises(ModelExportError) as caught:
                next(events)
        assert caught.value.reason == "UNAUTHENTICATED"
        rewrite(role="viewer")
        with closing(viewer.watch_exports(project="red")) as events:
            next(events)
            rewrite(projects=["blue"])
            with pytest.raises(ModelExportError) as caught:
                next(events)
        assert caught.value.reason == "PERMISSION_DENIED"
        wait_for(lambda: not place.server.coordinator.feed._watchers)


def test_a_watch_of_one_export_ends_with_the_right_to_see_it(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.security is not None
    place.security = _with(place.security, recheck_seconds=0.2)
    access = tmp_path / "access.yaml"
    with place, place.client_of("viewer") as viewer:
        name = submit_to(place, "red", "secret")
        entries = yaml.safe_load(access.read_text())["principals"]

        def rewrite(**changed: Any) -> None:
            people = [entry | changed if entry["name"] == "viewer" else entry for entry in entries]
            access.write_text(yaml.safe_dump({"principals": people}))

        with closing(viewer.watch_export(name)) as events:
            wait_for(lambda: next(events).export.state == pb.EXPORT_STATE_RUNNING)
            renewed = "slipway_renewed-token-of-the-viewer"
            (tmp_path / "viewer.token").write_text(renewed)
            rewrite(token_sha256=token_hash(renewed), projects=["red", "blue"])
            time.sleep(0.5)  # it is checked, and the client calls again with the other token
            with place.client_of("submitter") as submitter:
                submitter.cancel_export(name)
            assert [event.export.state for event in events if event.HasField("export")][-1] == pb.EXPORT_STATE_CANCELLED
        other = submit_to(place, "red", "more")
        for changed, reason in (({"projects": ["blue"]}, "EXPORT_NOT_FOUND"), ({}, "UNAUTHENTICATED")):
            rewrite(token_sha256=token_hash(renewed))
            with closing(viewer.watch_export(other)) as events:
                next(events)
                rewrite(**{"token_sha256": token_hash(renewed if changed else "slipway_another"), **changed})
                with pytest.raises(ModelExportError) as caught:
                    list(events)
            assert caught.value.reason == reason


def test_a_renewed_token_continues_a_watch(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.security is not None
    place.security = _with(place.security, recheck_seconds=0.2)
    access = tmp_path / "access.yaml"
    with place, place.client_of("viewer") as viewer, closing(viewer.watch_exports(project="red")) as events:
        next(events)
        renewed = "slipway_renewed-token-of-the-viewer"
        (tmp_path / "viewer.token").write_text(renewed)
        access.write_text(access.read_text().replace(token_hash(place.tokens["viewer"]), token_hash(renewed)))
        assert told(next(events))[0] == "bookmark"
        submit_to(place, "red", "later")
        assert told(next(events)) == ("created", "red/exports/later", "queued")


def _with(security: Any, **limits: Any) -> Any:
    return replace(security, limits=Limits(**limits))


def test_streams_of_a_caller_are_limited(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.security is not None
    place.security = _with(place.security, streams=2)
    with place, place.client_of("viewer") as viewer, place.client_of("neighbour") as neighbour:
        streams = [viewer.watch_exports(project="red") for _ in range(2)]
        for events in streams:
            next(events)
        with pytest.raises(ModelExportError) as caught:
            next(viewer.watch_exports(project="red", patience_seconds=0))
        assert caught.value.reason == "LIMIT_EXCEEDED"
        with closing(neighbour.watch_exports(project="blue")) as events:
            assert told(next(events))[0] == "bookmark"
        for events in streams:
            events.close()
        wait_for(lambda: not place.server.coordinator.feed._watchers)


def test_a_reader_that_does_not_read_ends_and_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "IN_MEMORY", 10)
    place = Place(tmp_path)
    assert place.security is not None
    place.security = _with(place.security, write_seconds=1.0)
    with place, place.client_of("viewer") as viewer, closing(viewer.watch_exports(project="red")) as quick:
        calls, request = viewer._calls, pb.WatchExportsRequest(parent="projects/red")
        slow = iter(calls.exports.WatchExports(request, metadata=calls.metadata()))
        last = next(slow).cursor
        assert told(next(quick))[0] == "bookmark"
        labels = {
            f"wide-{number}": "w" * 2000 for number in range(60)
        }  # 20 MB, more than lies between server and client
        for number in range(80):
            submit_to(place, "red", f"x{number}", labels=labels)
        changes = (
            event for event in quick if event.HasField("change")
        )  # it did not read meanwhile either, and resumed
        assert len({event.cursor for event in take(changes, 160)}) == 160
        wait_for(lambda: len(place.server.coordinator.feed._watchers) == 1)
        seen = []
        with pytest.raises(grpc.RpcError) as caught:
            seen.extend(slow)
        assert calls.failure(caught.value).reason == "TRANSFER_SLOW"
        last = seen[-1].cursor if seen else last
        assert len(seen) < 160
        with closing(viewer.watch_exports(project="red", cursor=last)) as rest:
            seen += take(rest, 1 + 160 - len(seen))[1:]
        assert len({event.cursor for event in seen}) == 160


async def test_the_client_for_asyncio_watches_too(tmp_path: Path) -> None:
    with Harness(tmp_path, with_worker=False) as harness:
        async with AsyncClient(harness.address) as client:
            events = client.watch_exports(filter="label.team:*")
            assert told(await anext(events))[0] == "bookmark"
            for name, labels in (("hidden", {}), ("shown", {"team": "speech"})):
                await asyncio.to_thread(harness.submit, tiny_export(name, tiny_task("a")).with_(labels=labels))
            assert told(await anext(events)) == ("created", "default/exports/shown", "queued")
            await events.aclose()
            assert "gguf" in [each.name async for each in client.list_formats()]
            assert (await client.list_workers()).hidden_workers == 0
