"""The inbox between the table of events and workflows: what is read, and what is only handed on."""

from __future__ import annotations

import pytest

from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.inbox import Inbox, InboxEvent

EXPORT = "projects/p/exports/x"


def message(number: int) -> InboxEvent:
    return InboxEvent(EXPORT, 1, number, Event(kind=EventKind.LEASED, time=float(number)))


async def test_a_run_that_was_just_created_is_not_read() -> None:
    reads: list[int] = []

    async def read(_export: str, _run: int, after: int) -> list[InboxEvent]:
        reads.append(after)
        return [message(number) for number in range(after + 1, 4)]

    inbox = Inbox(read)
    inbox.open(EXPORT, 1)
    inbox.deliver(message(1))  # before its workflow asks for the first time
    assert await inbox.after(EXPORT, 1, 0) == [message(1)]
    assert reads == []
    inbox.deliver(message(3))  # the one before is on its way
    assert await inbox.after(EXPORT, 1, 1) == [message(2), message(3)]
    assert reads == [1]


async def test_a_run_of_a_process_before_is_read() -> None:
    async def read(_export: str, _run: int, after: int) -> list[InboxEvent]:
        return [message(number) for number in range(after + 1, 3)]

    inbox = Inbox(read)
    inbox.deliver(message(2))  # nobody of this process waits for it yet
    assert await inbox.after(EXPORT, 1, 0) == [message(1), message(2)]


async def test_a_run_that_rests_is_woken_once_and_read_by_its_workflow() -> None:
    woken: list[tuple[str, int]] = []

    async def read(_export: str, _run: int, after: int) -> list[InboxEvent]:
        return [message(number) for number in range(after + 1, 3)]

    inbox = Inbox(read, on_first=lambda export, run: woken.append((export, run)))
    inbox.open(EXPORT, 1)
    assert inbox.rest(EXPORT, 1)
    inbox.deliver(message(1)._replace(run=2))  # of another run
    assert woken == []
    inbox.deliver(message(1))
    inbox.deliver(message(2))  # before its workflow has started
    assert woken == [(EXPORT, 1)]
    assert await inbox.after(EXPORT, 1, 0) == [message(1), message(2)]


async def test_a_run_does_not_rest_if_something_has_happened_and_loses_nothing() -> None:
    async def read(_export: str, _run: int, _after: int) -> list[InboxEvent]:
        return [message(1)]

    inbox = Inbox(read, on_first=lambda *_: pytest.fail("its workflow starts anyway"))
    inbox.open(EXPORT, 1)
    inbox.deliver(message(1))
    assert not inbox.rest(EXPORT, 1)
    assert await inbox.after(EXPORT, 1, 0) == [message(1)]


async def test_a_run_that_ended_is_not_woken() -> None:
    async def read(_export: str, _run: int, _after: int) -> list[InboxEvent]:
        return []

    inbox = Inbox(read, on_first=lambda *_: pytest.fail("it has ended"))
    inbox.rest(EXPORT, 1)
    inbox.close(EXPORT, 1)
    inbox.deliver(message(1))
