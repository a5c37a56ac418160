"""What a filter and an order of exports select, on a real database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway.errors import ServiceError
from slipway_coordinator.lifecycle.records import ExportState
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import SqliteState
from slipway_coordinator.storage.filters import in_projects, parse_filter, parse_predicate
from support.coordinators.harness import tiny_export, tiny_task


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Exports a to d, one second after the other; d is of another project."""
    database = Database(SqliteState(tmp_path_factory.mktemp("filters") / "state.db").url)
    database.prepare()
    rows = {
        "a": (ExportState.SUCCEEDED, {"team": "speech"}, "ci"),
        "b": (ExportState.FAILED, {"team": "text (new)", "tier": "gold"}, "ci"),
        "c": (ExportState.CANCELLED, {}, "ada"),
        "d": (ExportState.SUCCEEDED, {"team": "speech"}, "ada"),
    }
    for second, (name, (state, labels, creator)) in enumerate(rows.items()):
        times = {"create_time": 1e9 + second, "end_time": 1e9 + 60}
        project = "other" if name == "d" else "default"
        record = tiny_export(name, tiny_task("t")).with_(state=state, labels=labels, creator=creator, **times)
        database.insert(record.with_(name=f"projects/{project}/exports/{name}"))
    yield database
    database.close()


def names(database: Database, text: str, **order: bool) -> str:
    """Return the exports that the database selects; a test of each one selects the same."""
    found = [record.name[-1] for record in database.page(parse_filter(text), limit=10, **order)]
    matches = parse_predicate(text)
    assert [record.name[-1] for record in database.page([], limit=10, **order) if matches(record)] == found
    return "".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "dcba"),
        ("state=failed OR state=cancelled", "cb"),
        ("creator=ci AND state=succeeded OR state=failed", "ba"),  # OR binds closer, as AIP-160 has it
        ("(creator=ci AND state=succeeded) OR state=cancelled", "ca"),
        ("NOT state=succeeded", "cb"),
        ("-state=succeeded AND creator=ci", "b"),
        ("NOT NOT creator=ada", "dc"),
        ("NOT (creator=ci OR creator=nobody)", "dc"),
        ("label.team:*", "dba"),
        ("NOT labels.team:*", "c"),
        ("labels.team=speech", "da"),
        ('(label.team="text (new)")', "b"),
        ("(label.tier=gold)", "b"),
        ("((state=failed)) AND ( creator = ci )", "b"),
        ("label.team != speech", "cb"),
        ("create_time > 2001-09-09T01:46:40Z AND create_time < 2001-09-09T01:46:43Z", "cb"),
        ("end_time <= 2001-09-09T01:00:00Z OR creator=ada", "dc"),
    ],
)
def test_a_filter_selects(database: Database, text: str, expected: str) -> None:
    assert names(database, text) == expected
    assert names(database, text, oldest_first=True) == expected[::-1]


def test_a_time_that_is_not_set_meets_no_condition(tmp_path: Path) -> None:
    database = Database(SqliteState(tmp_path / "state.db").url)
    database.prepare()
    for name, end in (("a", None), ("b", 1e9)):
        record = tiny_export(name, tiny_task("t")).with_(create_time=1e9 + (name == "b"), end_time=end)
        database.insert(record.with_(name=f"projects/default/exports/{name}"))
    try:
        assert names(database, "end_time > 2000-01-01T00:00:00Z") == "b"
        assert names(database, "NOT end_time > 2000-01-01T00:00:00Z") == "a"
        assert names(database, "NOT end_time <= 2000-01-01T00:00:00Z") == "ba"
    finally:
        database.close()


@pytest.mark.parametrize(
    "text",
    [
        "state=failed OR",
        "OR state=failed",
        "state=failed AND AND state=failed",
        "(state=failed",
        "state=failed)",
        "()",
        "NOT",
        "state:failed",
        "label.team:speech",
        "state = failed state = failed",
        "(" * 17 + "state=failed" + ")" * 17,
        "(" * 4000,
        "NOT " * 1000,
        " OR ".join(["state=failed"] * 17),
    ],
)
def test_what_is_no_filter_is_refused(text: str) -> None:
    with pytest.raises(ServiceError) as caught:
        parse_filter(text)
    assert caught.value.reason == "REQUEST_INVALID"
    assert caught.value.about == {"field": "filter"}


def test_pages_go_on_in_either_order(database: Database) -> None:
    first = database.page([], limit=2, oldest_first=True)
    last = first[-1]
    rest = database.page([], limit=9, after=(last.create_time, last.name), oldest_first=True)
    assert "".join(record.name[-1] for record in (*first, *rest)) == "abcd"


def test_some_projects_are_selected(database: Database) -> None:
    assert len(database.page(in_projects(None), limit=9)) == 4
    assert len(database.page(in_projects(["default"]), limit=9)) == 3
    assert len(database.page(in_projects({"default", "other"}), limit=9)) == 4
    assert database.page(in_projects([]), limit=9) == []
