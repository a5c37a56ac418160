"""A change of an export is made a message, and JSON, once for all who watch; what is kept for that has limits."""

from __future__ import annotations

import asyncio
import time

import pytest

from slipway_coordinator.api import messages as messages_module
from slipway_coordinator.api.messages import ExportsEvents
from slipway_coordinator.http.responses import ConvertedChanges
from slipway_coordinator.lifecycle.changes import ChangeKind, ExportChange
from slipway_coordinator.storage.changes import NumberedChange, Position
from slipway_coordinator.workflow.feed import FeedEvent
from support.coordinators.harness import tiny_export, tiny_task


def event(number: int, *, labels: dict[str, str] | None = None) -> FeedEvent:
    export = tiny_export(f"x{number}", tiny_task("m")).with_(labels=labels or {})
    change = ExportChange.of(ChangeKind.CREATED, export)
    stored = NumberedChange(number, 1000.0 + number, change, len(change.model_dump_json()), number)
    return FeedEvent(stored.position, stored)


def test_all_watchers_receive_the_same_message() -> None:
    events = ExportsEvents()
    first = events.of(event(1))
    assert events.of(event(1)) is first
    assert events.of(event(2)) is not first
    assert (first.change.export.name, first.cursor) == ("projects/default/exports/x1", event(1).position.cursor)
    bookmark = events.of(FeedEvent(Position(1, 1)))
    assert bookmark.WhichOneof("event") == "bookmark"
    assert events.of(FeedEvent(Position(1, 1))) is not bookmark


def test_a_thousand_watchers_cost_little_more_than_one() -> None:
    events, changes = ExportsEvents(), [event(number, labels={"a": "b" * 50}) for number in range(20)]
    began = time.thread_time()
    for _ in range(1000):
        for change in changes:
            events.of(change)
    assert time.thread_time() - began < 0.1  # 0.6 s if each has its own


@pytest.mark.parametrize(("most", "size"), [(3, 1 << 20), (1000, 2000), (1000, 0)])
def test_what_is_kept_has_limits(monkeypatch: pytest.MonkeyPatch, most: int, size: int) -> None:
    monkeypatch.setattr(messages_module, "IN_MEMORY", most)
    monkeypatch.setattr(messages_module, "IN_MEMORY_SIZE", size)
    events = ExportsEvents()
    for number in range(20):
        assert events.of(event(number)).change.export.name.endswith(f"/x{number}")
        assert len(events._made) <= most
        assert sum(made[1] for made in events._made.values()) == events._size <= size


async def test_json_is_made_once_even_for_readers_who_come_or_leave_meanwhile() -> None:
    changes, large = ConvertedChanges(), ExportsEvents().of(event(1, labels={f"l{n}": "x" * 900 for n in range(60)}))
    leaving = asyncio.create_task(changes.of("1-1", large))
    others = [asyncio.create_task(changes.of("1-1", large)) for _ in range(5)]
    await asyncio.sleep(0)
    leaving.cancel()
    texts = await asyncio.gather(*others)
    assert all(text is texts[0] for text in texts)
    assert "x" * 900 in texts[0]
    for number in range(300):
        await changes.of(f"2-{number}", large)
    assert len(changes._made) <= 100
