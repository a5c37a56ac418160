"""Periodic work of the coordinator: forget ended exports, and report offers that wait for long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from slipway.errors import ServiceError
from slipway.observability.audit_facts import DONE
from slipway.observability.telemetry import within
from slipway.planning.references import AttemptKey
from slipway.security.access import audit
from slipway.texts import counted
from slipway_coordinator.broker.board import Board
from slipway_coordinator.lifecycle.offers import Offer
from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.events import Hub
from slipway_coordinator.storage.journal import Journal
from slipway_protos.v1 import export_pb2

T = TypeVar("T")

log = logging.getLogger("slipway.coordinator")

_WHO = "(--retain-days)"  # stands in the audit log for a principal
_EVERY_SECONDS = 600.0
_AT_ONCE = 100
_DAY_SECONDS = 86_400.0

Notify = Callable[[str, Event, str], Awaitable[None]]
"""``notify(export, event, key)``: store an event for an export's workflow, once per key."""

# Longer than it takes to start a worker on an existing node. A worker that comes later can still take the task.
SAY_AFTER_SECONDS = 60.0

_MOST_LINES = 20
"""Lines of the log at a time: a queue of thousands may wait for one worker."""
_HELD_BACK = "another task is importing one of its sources, which it then finds in the store"


class Exports(Protocol):
    """The part of a coordinator that forgetting needs."""

    database: Database
    journal: Journal

    async def call(self, function: Callable[[], T]) -> T:
        """Run a blocking function in a thread."""

    async def delete(self, record: ExportRecord) -> None:
        """Delete an export that ended."""


async def forget_old(coordinator: Exports, *, days: float) -> int:
    """Forget exports that ended more than ``days`` ago, their workflows, and artifacts made as long ago; return how many exports."""
    before = time.time() - days * _DAY_SECONDS
    forgotten = 0
    while old := await coordinator.call(lambda: coordinator.database.find_ended_before(before, limit=_AT_ONCE)):
        for record in old:
            try:
                await coordinator.delete(record)
            except ServiceError as error:
                if error.reason != "EXPORT_STATE":  # it was retried, so it is not old any more
                    raise
            else:
                audit.write("DeleteExport", outcome=DONE, principal=_WHO, resource=record.name)
                forgotten += 1
    while await coordinator.journal.commit(lambda: coordinator.database.ownership.forget_artifacts(before=before)):
        pass  # some at a time: others wait for the journal
    return forgotten


async def keep_forgetting(coordinator: Exports, *, days: float) -> None:
    """Forget old exports every few minutes, for as long as the coordinator runs."""
    while True:
        try:
            forgotten = await forget_old(coordinator, days=days)
        except ServiceError as error:
            log.warning(f"old exports cannot be forgotten now: {error}")
        except Exception:  # if this loop ended, nothing would ever be forgotten again
            log.exception("forgetting old exports failed")
        else:
            if forgotten:
                log.info(f"forgot {forgotten} exports that ended more than {days:g} days ago")
        await asyncio.sleep(_EVERY_SECONDS)


class Unserved:
    """Watches for waiting offers that no worker can take.

    Args:
        board: Knows the offers and workers.
        hub: Sends warnings to an export's watchers.
        notify: Stores events for an export's workflow.
        fail_after: Seconds after which such an attempt fails; None waits for ever.
        say_after: Seconds after which one warning is published.
    """

    def __init__(
        self,
        board: Board,
        hub: Hub,
        notify: Notify,
        *,
        fail_after: float | None,
        say_after: float = SAY_AFTER_SECONDS,
    ) -> None:
        self._board = board
        self._hub = hub
        self._notify = notify
        self._fail_after = fail_after
        self._say_after = say_after
        self._said: set[AttemptKey] = set()

    async def check(self) -> None:
        """Publish the warnings, or fail the attempts, that are due. With an engine, its reports say why they wait."""
        if self._board.engine:
            return
        if self._fail_after is not None:
            for offer in self._board.unserved_offers(longer_than=self._fail_after):
                await self._fail(offer)
            return
        unserved = self._board.unserved_offers(longer_than=self._say_after, now_ready=True)
        held_back = {offer.key: offer for offer in self._board.held_back_offers(longer_than=self._say_after)}
        late = held_back | {offer.key: offer for offer in unserved}
        self._said &= set(late)
        new = sorted(set(late) - self._said)
        for number, key in enumerate(new):
            why = _HELD_BACK if key in held_back else self._board.lacking(late[key])
            await self._say(late[key], why, logged=number < _MOST_LINES)
            self._said.add(key)
        if len(new) > _MOST_LINES:
            log.warning(
                f"{counted(len(new) - _MOST_LINES, 'more task')} waiting: watchers of their exports are told why"
            )

    async def _say(self, offer: Offer, why: str, *, logged: bool) -> None:
        message = f"{offer.task} waits: {why}"
        if logged:
            with within(offer.traceparent):
                log.warning(f"{offer.key}: {message}")
        await self._hub.publish(offer.export, export_pb2.LogLine(task=offer.task, level="warning", message=message))

    async def _fail(self, offer: Offer) -> None:
        failure = ServiceError(
            self._board.lacking(offer),
            reason="NO_WORKER",
            remedy="run slipway doctor, which says what is missing and how to install it",
            about={"stage": offer.stage},
        ).failure()
        event = Event(kind=EventKind.FAILED, time=time.time(), task=offer.task, attempt=offer.attempt, failure=failure)
        await self._notify(offer.export, event, f"{offer.key}#unserved")
