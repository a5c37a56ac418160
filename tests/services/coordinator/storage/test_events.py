"""Events for those who watch: numbered, resumable, and over with the export's end."""

from __future__ import annotations

import asyncio

from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.storage.events import ENDED_CHANNELS_KEPT, Hub, WatchEvent
from slipway_protos.v1 import export_pb2
from support.coordinators.harness import tiny_export, tiny_task

RUNNING = tiny_export("x", tiny_task("m")).with_(state=ExportState.RUNNING)
ENDED = RUNNING.with_(state=ExportState.SUCCEEDED, revision=2)


def hub(stored: ExportRecord = RUNNING) -> Hub:
    """Events over one stored export; whoever publishes a record has stored it."""

    async def reserve(name: str) -> int:
        return 0

    async def load(name: str) -> ExportRecord | None:
        return stored if name == RUNNING.name else None

    return Hub(reserve, load)


async def watched(events: Hub, *, after: int = 0) -> list[WatchEvent]:
    return [event async for event in events.watch(RUNNING.name, after=after)]


async def test_the_end_of_an_export_is_the_last_event() -> None:
    events = hub()
    await events.publish(RUNNING.name, export_pb2.TaskProgress(task="m", phase="early"))
    await events.publish(RUNNING.name, ENDED)
    # A report that was on its way when the result came in.
    await events.publish(RUNNING.name, export_pb2.TaskProgress(task="m", phase="late"))
    await events.publish(RUNNING.name, export_pb2.LogLine(message="late"))
    seen = await watched(events)
    assert seen[-1].payload == ENDED
    assert await watched(events, after=seen[-1].sequence) == []


async def test_another_run_of_an_export_that_ended_is_told() -> None:
    events = hub(ENDED)
    await events.publish(RUNNING.name, ENDED)
    last = (await watched(events))[-1].sequence
    await events.publish(RUNNING.name, RUNNING.with_(revision=3, run=2))
    await events.publish(RUNNING.name, export_pb2.TaskProgress(task="m", phase="again"))
    await events.publish(RUNNING.name, ENDED.with_(revision=4, run=2))
    seen = await watched(events, after=last)
    assert [type(event.payload).__name__ for event in seen] == ["TaskProgress", "ExportRecord"]


async def test_the_end_is_told_to_a_reader_that_was_busy_meanwhile() -> None:
    events = hub()
    reading = events.watch(RUNNING.name, after=0)
    assert (await anext(reading)).payload == RUNNING
    await events.publish(RUNNING.name, ENDED)
    assert [event.payload async for event in reading] == [ENDED]


def test_a_channel_that_opens_while_a_record_is_published_has_it() -> None:
    async def story() -> None:
        opening, go_on = asyncio.Event(), asyncio.Event()

        async def load(name: str) -> ExportRecord | None:
            opening.set()
            await go_on.wait()
            return RUNNING

        async def reserve(name: str) -> int:
            return 0

        events = Hub(reserve, load)
        reading = asyncio.create_task(watched(events))
        await opening.wait()
        publishing = asyncio.create_task(events.publish(RUNNING.name, ENDED))
        await asyncio.sleep(0)
        go_on.set()
        async with asyncio.timeout(60):
            await publishing
            assert (await reading)[-1].payload == ENDED

    asyncio.run(story())


def test_looking_at_all_that_ended_keeps_little_of_it() -> None:
    async def story() -> None:
        names = [f"projects/default/exports/{number}" for number in range(3 * ENDED_CHANNELS_KEPT)]

        async def load(name: str) -> ExportRecord | None:
            return ENDED.with_(name=name)

        async def reserve(_: str) -> int:
            return 0

        events = Hub(reserve, load)
        for name in names:
            assert len([event async for event in events.watch(name, after=0)]) == 1
        assert len(events._channels) == ENDED_CHANNELS_KEPT

    asyncio.run(story())


async def test_nobody_hears_of_an_unknown_export() -> None:
    events = hub()
    await events.publish("projects/default/exports/none", ENDED)
    assert [event async for event in events.watch("projects/default/exports/none", after=0)] == []


async def test_a_state_that_was_read_when_the_channel_was_opened_is_told_once() -> None:
    """The export ends, somebody begins to watch, and only then its end is published."""
    events = hub(ENDED)
    (only,) = await watched(events)
    await events.publish(RUNNING.name, ENDED)
    assert await watched(events, after=only.sequence) == []


async def test_progress_of_tasks_that_an_export_does_not_have_is_not_kept() -> None:
    """A worker could name any number of them."""
    events = hub()
    for number in range(100):
        await events.publish(RUNNING.name, export_pb2.TaskProgress(task=f"other-{number}"))
    await events.publish(RUNNING.name, export_pb2.TaskProgress(task="m", phase="early"))
    await events.publish(RUNNING.name, ENDED)
    seen = [event.payload for event in await watched(events)]
    assert [one.task for one in seen if isinstance(one, export_pb2.TaskProgress)] == ["m"]
