"""Count the deliveries that wait, and give up those that have waited for too long, or that are too many."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from slipway.errors import ServiceError
from slipway.observability import metrics
from slipway.observability.metrics import reading
from slipway_coordinator.coordinator import Coordinator
from slipway_coordinator.storage.deliveries import BATCH, Delivery, Waiting
from slipway_coordinator.webhooks.lines import Line, report_loss
from slipway_coordinator.webhooks.receivers import Receiver, Webhooks

log = logging.getLogger("slipway.coordinator.webhooks")

COUNT_SECONDS = 5.0
TIDY_SECONDS = 60.0
MOST_WAITING = 100_000
"""Deliveries of one receiver that wait; of more, the oldest are given up."""
GRACE_SECONDS = 3600.0
"""Nothing is too old before a sender has tried for so long: what waited may have waited for the sender, and not for its receiver."""
_OTHERS_KEPT_SECONDS = 72 * 3600.0
_CLOCK_SECONDS = 60.0
"""A clock that moved this much against the monotonic one was set."""


class Housekeeping:
    """Keeps the table of a sender's deliveries in bounds.

    Args:
        coordinator: Has the table.
        webhooks: Returns the receivers of this moment.
        lines: What the sender knows of them, by their names.
    """

    def __init__(self, coordinator: Coordinator, webhooks: Callable[[], Webhooks], lines: dict[str, Line]) -> None:
        self._coordinator = coordinator
        self._webhooks = webhooks
        self._lines = lines
        self._waiting: Mapping[str, Waiting] = {}
        self._tidied = 0.0

    async def run(self) -> None:
        """Keep house until cancelled."""
        patience = Patience()  # from now on: a standby may have waited for days
        with reading(self._samples):
            while True:
                try:
                    await self._keep_house(patience)
                except ServiceError as error:
                    log.warning(f"events that wait cannot be counted now: {error}")
                except Exception:  # if this loop ended, nothing would ever be given up
                    log.exception("counting the events that wait failed")
                await asyncio.sleep(COUNT_SECONDS if self._webhooks().receivers else TIDY_SECONDS)

    async def _keep_house(self, patience: Patience) -> None:
        self._waiting = await self._coordinator.call(self._coordinator.database.deliveries.count_waiting)
        if time.monotonic() < self._tidied + TIDY_SECONDS:
            return
        self._tidied = time.monotonic()
        patient = patience.seconds() < GRACE_SECONDS
        for name, waiting in self._waiting.items():
            await self._give_up_most(name, waiting.number - MOST_WAITING)
        if patient:
            return
        receivers = self._webhooks().receivers
        for receiver in receivers:
            await self._give_up_old(receiver)
        for name in sorted(set(self._waiting) - {receiver.name for receiver in receivers}):
            before = time.time() - _OTHERS_KEPT_SECONDS
            await self._give_up(name, "the webhooks file does not name its receiver", before=before, untried=True)

    async def _give_up_old(self, receiver: Receiver) -> None:
        """Give up what was tried for long enough; what was never tried only if the receiver was down for as long."""
        hours, down_since = receiver.entry.keep_hours, self._lines.setdefault(receiver.name, Line()).down_since
        untried = down_since is not None and time.monotonic() - down_since >= hours * 3600
        why = f"the receiver {receiver.name} did not take it within {hours:g} hours"
        await self._give_up(receiver.name, why, before=time.time() - hours * 3600, untried=untried)

    async def _give_up_most(self, receiver: str, number: int) -> None:
        why = f"more than {MOST_WAITING} events wait for the receiver {receiver}"
        while number > 0:
            lost = await self._drop(receiver, untried=True, most=min(number, BATCH))
            report_loss(lost, why)
            number = number - len(lost) if lost else 0

    async def _give_up(self, receiver: str, why: str, *, before: float, untried: bool) -> None:
        while lost := await self._drop(receiver, before=before, untried=untried):
            report_loss(lost, why)

    async def _drop(
        self, receiver: str, *, untried: bool, before: float | None = None, most: int = BATCH
    ) -> list[Delivery]:
        """Remove a few in a commit of their own, as changes of exports wait for it; what is under way may just arrive."""
        table, line = self._coordinator.database.deliveries, self._lines.get(receiver, Line())

        def drop() -> list[Delivery]:
            return table.give_up(receiver, before=before, untried=untried, spare=list(line.sending), most=most)

        return await self._coordinator.journal.commit(drop, later=True)

    def _samples(self) -> Iterator[metrics.Sample]:
        """Yield the gauges of this moment, of the receivers in the file alone. Safe from any thread."""
        waiting, now = self._waiting, time.time()
        for receiver in self._webhooks().receivers:
            number, oldest = waiting.get(receiver.name, Waiting(0, now))
            yield metrics.WEBHOOK_WAITING, {"receiver": receiver.name}, float(number)
            yield metrics.WEBHOOK_AGE, {"receiver": receiver.name}, max(now - oldest, 0.0)


class Patience:
    """How long times of the table can have been compared with the clock: since the start, or since the clock was set."""

    def __init__(self) -> None:
        self._since = self._steady = time.monotonic()
        self._wall = time.time()

    def seconds(self) -> float:
        """Return it; called again and again."""
        wall, steady = time.time(), time.monotonic()
        moved = (wall - self._wall) - (steady - self._steady)
        if abs(moved) > _CLOCK_SECONDS:
            log.warning(f"the clock moved by {moved:.0f} s: for an hour, no event is given up")
            self._since = steady
        self._wall, self._steady = wall, steady
        return steady - self._since
