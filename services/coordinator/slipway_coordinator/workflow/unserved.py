"""Offers that no known worker can take: said to those who watch, and failed where nobody will come."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from slipway.errors import ServiceError
from slipway.observability.telemetry import within
from slipway.planning.attempt_keys import AttemptKey
from slipway_coordinator.broker.board import Board
from slipway_coordinator.model.offers import Offer
from slipway_coordinator.model.transitions import Event, EventKind
from slipway_coordinator.storage.events import Hub
from slipway_protos.v1 import export_pb2

log = logging.getLogger("slipway.coordinator")

Notify = Callable[[str, Event, str], Awaitable[None]]
"""``notify(export, event, key)``: tell an export's workflow something, durably, once per key."""

# Longer than it takes to start a worker on a node that is there; a worker that comes later takes the task all the same.
SAY_AFTER_SECONDS = 60.0


class Unserved:
    """Looks at the offers that wait from time to time.

    Args:
        board: Knows what waits, and which workers there are.
        hub: Tells those who watch an export.
        notify: Tells an export's workflow.
        fail_after: Seconds after which such an attempt fails; None waits for ever.
        say_after: Seconds after which it is said, once.
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

    async def look(self) -> None:
        """Do what is due."""
        if self._fail_after is not None:
            for offer in self._board.unserved(longer_than=self._fail_after):
                await self._fail(offer)
            return
        late = {offer.key: offer for offer in self._board.unserved(longer_than=self._say_after, now_ready=True)}
        self._said &= set(late)
        for key in sorted(set(late) - self._said):
            await self._say(late[key])
            self._said.add(key)

    async def _say(self, offer: Offer) -> None:
        message = f"{offer.task} waits: {self._board.lacking(offer)}"
        with within(offer.traceparent):
            log.warning(f"{offer.key}: {message}")
        await self._hub.publish(offer.export, export_pb2.LogLine(task=offer.task, level="warning", message=message))

    async def _fail(self, offer: Offer) -> None:
        failure = ServiceError(
            self._board.lacking(offer),
            reason="NO_WORKER",
            remedy="slipway doctor says what is missing for it, and how to install it",
            about={"stage": offer.stage},
        ).failure()
        event = Event(kind=EventKind.FAILED, time=time.time(), task=offer.task, attempt=offer.attempt, failure=failure)
        await self._notify(offer.export, event, f"{offer.key}#unserved")
