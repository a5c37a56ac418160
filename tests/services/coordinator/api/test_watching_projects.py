"""WatchExports on a real server: every change of what a caller may see, once and in order, across deletions and disconnects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.artifact_places import Place
from support.coordinators.event_readers import submit_to, take, told
from support.coordinators.harness import wait_for


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Place(tmp_path_factory.mktemp("watched")) as place:
        yield place


def end(place: Place, who: str, name: str) -> None:
    """Cancel an export and delete it."""
    with place.client_of(who) as client:
        client.cancel_export(name)
        wait_for(lambda: client.get_export(name).state == pb.EXPORT_STATE_CANCELLED)
    with place.client_of("admin") as client:
        client.delete_export(name)


def test_a_project_is_watched_across_the_deletion_of_an_export(place: Place) -> None:
    with place.client_of("viewer") as viewer, closing(viewer.watch_exports(project="red")) as events:
        assert told(next(events)) == ("bookmark", "", "")
        submit_to(place, "blue", "hidden")
        name = submit_to(place, "red", "one", labels={"team": "speech"})
        seen = take(events, 2)
        end(place, "submitter", name)
        seen += take(events, 2)
    assert list(map(told, seen)) == [
        ("created", "red/exports/one", "queued"),
        ("state_changed", "red/exports/one", "running"),
        ("state_changed", "red/exports/one", "cancelled"),
        ("deleted", "red/exports/one", "cancelled"),
    ]
    previous = [event.change.previous_state for event in seen]
    assert previous == [0, pb.EXPORT_STATE_QUEUED, pb.EXPORT_STATE_RUNNING, pb.EXPORT_STATE_CANCELLED]
    assert all(event.change.export.labels == {"team": "speech"} for event in seen)
    assert all(event.change.export.etag and not event.change.export.tasks for event in seen)
    assert [event.time.ToMicroseconds() for event in seen] == sorted(event.time.ToMicroseconds() for event in seen)


def test_the_documented_table_of_states_has_all_exports_and_no_deleted_one(place: Place) -> None:
    page = (Path(__file__).parents[4] / "docs" / "clients.md").read_text()
    (example,) = (block.partition("```")[0] for block in page.split("```python") if "a bookmark: it watches" in block)

    def watched(client: Client) -> Iterator[pb.ExportsEvent]:
        with closing(client.watch_exports(project="red")) as events:
            yield next(events)
            end(place, "submitter", submit_to(place, "red", "table-gone"))
            submit_to(place, "red", "table-kept")
            for event in events:
                yield event
                if (told(event)[1], event.change.export.state) == ("red/exports/table-kept", pb.EXPORT_STATE_RUNNING):
                    return

    for written, here in (
        ('slipway.Client("coordinator:7070", project="research")', 'place.client_of("viewer")'),
        ("client.watch_exports()", "watched(client)"),
        ("list_exports(summary=True)", 'list_exports(project="red", summary=True)'),
    ):
        assert example.count(written) == 1
        example = example.replace(written, here)
    known: dict[str, Any] = {"place": place, "watched": watched}
    exec(example, known)
    states = {name.rpartition("/")[2]: state for name, state in known["states"].items()}
    assert states["table-kept"] == pb.EXPORT_STATE_RUNNING
    assert "table-gone" not in states


def test_whoever_continues_after_a_cursor_loses_and_repeats_nothing(place: Place) -> None:
    with place.client_of("viewer") as viewer:
        with closing(viewer.watch_exports(project="red")) as events:
            first = next(events)
            names = [submit_to(place, "red", f"resumed-{number}") for number in range(3)]
            whole = take(events, 6)
        for name in names:
            end(place, "submitter", name)
        with closing(viewer.watch_exports(project="red", cursor=whole[-1].cursor)) as events:
            whole += take(events, 7)[1:]
        for number, event in enumerate([first, *whole[:-1]]):
            with closing(viewer.watch_exports(project="red", cursor=event.cursor)) as events:
                again = take(events, 1 + len(whole) - number)
            assert again[0].cursor == event.cursor
            assert again[1:] == whole[number:]
    assert len({event.cursor for event in whole}) == len(whole) == 12


def test_a_filter_shows_what_matches_after_each_change(place: Place) -> None:
    with (
        place.client_of("viewer") as viewer,
        closing(viewer.watch_exports(project="red", filter="state=cancelled AND label.team=speech")) as events,
    ):
        next(events)
        for number in range(4):
            team = "speech" if number % 2 else "text"
            end(place, "submitter", submit_to(place, "red", f"filtered-{number}", labels={"team": team}))
        assert list(map(told, take(events, 4))) == [
            ("state_changed", "red/exports/filtered-1", "cancelled"),
            ("deleted", "red/exports/filtered-1", "cancelled"),
            ("state_changed", "red/exports/filtered-3", "cancelled"),
            ("deleted", "red/exports/filtered-3", "cancelled"),
        ]


def test_each_caller_watches_its_own_projects(place: Place) -> None:
    with (
        place.client_of("viewer") as viewer,
        place.client_of("neighbour") as neighbour,
        place.client_of("admin") as admin,
    ):
        streams = [client.watch_exports(project="-") for client in (viewer, neighbour, admin)]
        for events in streams:
            next(events)
        for project in ("red", "blue", "red"):
            submit_to(place, project, f"own-{time.monotonic_ns()}")
        seen = [[told(event)[1].partition("/")[0] for event in take(events, count)]
                for events, count in zip(streams, (4, 2, 6), strict=True)]  # fmt: skip
        assert [set(projects) for projects in seen] == [{"red"}, {"blue"}, {"red", "blue"}]
        cursor = neighbour_cursor(admin)
        with closing(viewer.watch_exports(project="-", cursor=cursor)) as events:  # a place is no right
            assert told(next(events))[0] == "bookmark"
        for events in streams:
            events.close()
        for client, project in ((viewer, "blue"), (neighbour, "red"), (neighbour, "none")):
            with pytest.raises(ModelExportError) as caught:
                next(client.watch_exports(project=project))
            assert caught.value.reason == "PERMISSION_DENIED"


def neighbour_cursor(client: Client) -> str:
    with closing(client.watch_exports(project="blue")) as events:
        return str(next(events).cursor)


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"cursor": "x"}, "REQUEST_INVALID", "cursor"),
        ({"cursor": "1-1\n"}, "REQUEST_INVALID", "cursor"),
        ({"cursor": "\u0661-1"}, "REQUEST_INVALID", "cursor"),
        ({"cursor": "1-" + "1" * 4000}, "REQUEST_INVALID", "cursor"),
        ({"cursor": "1" * 9000}, "LIMIT_EXCEEDED", "cursor"),
        ({"cursor": "1\0"}, "REQUEST_INVALID", "cursor"),
        ({"cursor": "1-1"}, "CURSOR_EXPIRED", "cursor"),
        ({"cursor": "fffffffffffffff-fffffffffffffff"}, "CURSOR_EXPIRED", "cursor"),
        ({"filter": "state=lost"}, "REQUEST_INVALID", "filter"),
        ({"filter": "(" * 4000}, "REQUEST_INVALID", "filter"),
        ({"filter": "state=failed OR" * 200}, "REQUEST_INVALID", "filter"),
        ({"filter": "x" * 9000}, "LIMIT_EXCEEDED", "filter"),
        ({"project": "red/exports/x"}, "REQUEST_INVALID", "parent"),
        ({"project": ""}, "REQUEST_INVALID", "parent"),
    ],
)
def test_what_cannot_be_watched_is_refused(place: Place, fields: dict[str, str], reason: str, field: str) -> None:
    request = pb.WatchExportsRequest(parent=f"projects/{fields.pop('project', 'red')}", **fields)
    with place.client_of("viewer") as client:
        calls = client._calls
        stream = calls.exports.WatchExports(request, metadata=calls.metadata(), timeout=60)
        with pytest.raises(grpc.RpcError) as caught:
            next(iter(stream))
        failure = calls.failure(caught.value)
    assert (failure.reason, failure.about.get("field")) == (reason, field)
