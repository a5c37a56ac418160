"""Send the deliveries that wait, again until they arrive, while this coordinator is active.

An export's events reach a receiver in their order; those of different exports go side by side, a few at a time, and no receiver waits
for another. What failed is tried again after a pause that doubles, kept in the table: another coordinator goes on from there. A
receiver that fails several times in a row is tried with one event at a time, and those that were tried least go first: it may refuse
only some. Once it takes one, the others follow at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, Protocol

from slipway.errors import ServiceError
from slipway.observability import metrics
from slipway_coordinator.coordinator import Coordinator
from slipway_coordinator.lifecycle.quotas import project_of_export
from slipway_coordinator.storage.deliveries import BATCH, Delivery
from slipway_coordinator.webhooks.housekeeping import Housekeeping
from slipway_coordinator.webhooks.lines import DOWN_AFTER, Line, report_loss
from slipway_coordinator.webhooks.posting import Attempt, Outcome, post
from slipway_coordinator.webhooks.receivers import Receiver, Webhooks

log = logging.getLogger("slipway.coordinator.webhooks")

LOOK_SECONDS = 1.0
_REFRESH_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 900.0
_LONGEST_DOWN_PAUSE = 60.0
"""Longest time between two attempts at a receiver that is down."""
_HOLD_SECONDS = 10.0


class Source(Protocol):
    """Where receivers come from: the webhooks file."""

    def current(self) -> Webhooks:
        """Return the receivers that were read last; at once, in any thread."""

    def refresh(self) -> None:
        """Read them again if they have changed. This may take seconds."""


class Sender:
    """Sends the deliveries of a coordinator, from :meth:`start` to :meth:`stop`.

    Args:
        coordinator: Has the table; it is started before, and stopped after this.
        webhooks: Returns the receivers of this moment.
    """

    def __init__(self, coordinator: Coordinator, webhooks: Source) -> None:
        self._coordinator = coordinator
        self._webhooks = webhooks
        self._lines: dict[str, Line] = {}
        self._housekeeping = Housekeeping(coordinator, webhooks.current, self._lines)
        self._freed: set[str] = set()  # receivers of which a delivery has ended since the last look
        self._woken = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to send."""
        parts: list[Coroutine[Any, Any, None]] = [self._run(), self._refresh(), self._housekeeping.run()]
        self._running = [asyncio.create_task(part, context=contextvars.Context()) for part in parts]

    async def stop(self) -> None:
        """Stop at once; what was under way is sent again by the next coordinator."""
        tasks = self._running + [task for line in self._lines.values() for task in line.sending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        looked_at_all = -LOOK_SECONDS
        while True:
            freed, self._freed = self._freed, set()
            self._woken.clear()
            is_time = time.monotonic() >= looked_at_all + LOOK_SECONDS
            looked_at_all = time.monotonic() if is_time else looked_at_all
            await self._look(None if is_time else freed)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(looked_at_all + LOOK_SECONDS - time.monotonic()):
                    await self._woken.wait()

    async def _refresh(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._webhooks.refresh)
            except Exception:  # if this loop ended, no change would ever be seen again
                log.exception("reading the webhooks file again failed")
            await asyncio.sleep(_REFRESH_SECONDS)

    async def _look(self, names: set[str] | None) -> None:
        """Begin the deliveries to these receivers (None: to all) that are due, as far as there is room."""
        receivers = [one for one in self._webhooks.current().receivers if names is None or one.name in names]
        await asyncio.gather(*(self._look_at(receiver) for receiver in receivers))

    async def _look_at(self, receiver: Receiver) -> None:
        try:
            await self._begin_due(receiver, self._lines.setdefault(receiver.name, Line()))
        except ServiceError as error:
            log.warning(f"events cannot be sent to {receiver.name} now: {error}")
        except Exception:  # a fault with one receiver must not keep the others from theirs
            log.exception(f"sending events to {receiver.name} failed")

    async def _begin_due(self, receiver: Receiver, line: Line) -> None:
        room = line.room(time.monotonic())
        if room <= 0:
            return
        sending = set(line.sending)  # what arrives during the query may still be in its result
        due = await self._find_due(receiver.name, room + len(sending), least_tried=line.is_down)
        for delivery in [one for one in due if one.id not in sending][:room]:
            if not receiver.entry.is_told(delivery.type, project_of_export(delivery.export)):
                await self._leave_out(receiver, delivery)
                continue
            task = asyncio.create_task(self._send(receiver, line, delivery))
            line.sending[delivery.id] = task

    async def _leave_out(self, receiver: Receiver, delivery: Delivery) -> None:
        """Remove what the receiver was to be told when it was stored, and is not to be told any more."""
        table = self._coordinator.database.deliveries
        await self._coordinator.journal.commit(partial(table.remove, receiver.name, delivery.id), later=True)
        log.info(
            f"{delivery.type} of {delivery.export} is not sent: the receiver {receiver.name} is not told of it now"
        )
        self._freed.add(receiver.name)
        self._woken.set()

    async def _find_due(self, receiver: str, most: int, *, least_tried: bool) -> list[Delivery]:
        table, now = self._coordinator.database.deliveries, time.time()
        find = partial(table.find_due, receiver, now=now, most=most, least_tried=least_tried)
        return await self._coordinator.call(find)

    async def _send(self, receiver: Receiver, line: Line, delivery: Delivery) -> None:
        try:
            try:
                attempt = await post(receiver, delivery)
            except Exception as error:  # counted as a failure, so that the next attempt waits
                log.exception(f"sending to the receiver {receiver.name} failed")
                attempt = Attempt(Outcome.FAILED, type(error).__name__)
            metrics.WEBHOOK_ATTEMPTS.add(receiver=receiver.name, outcome=attempt.outcome.value)
            await self._settle(receiver, line, delivery, attempt)
        except ServiceError as error:
            self._hold(line)
            log.warning(f"how {delivery.id} reached {receiver.name} cannot be stored, so it is sent again: {error}")
        except Exception:
            self._hold(line)
            log.exception(f"how {delivery.id} reached {receiver.name} cannot be stored, so it is sent again")
        finally:
            del line.sending[delivery.id]
            self._freed.add(receiver.name)
            self._woken.set()

    def _hold(self, line: Line) -> None:
        """Send nothing for a while: what cannot be stored stays due, and would be sent again at once."""
        line.not_before = time.monotonic() + _HOLD_SECONDS

    async def _settle(self, receiver: Receiver, line: Line, delivery: Delivery, attempt: Attempt) -> None:
        """Store how an attempt ended."""
        if attempt.outcome is Outcome.FAILED:
            await self._postpone(receiver, line, delivery, attempt)
            return
        was_down = line.is_down or delivery.attempts >= DOWN_AFTER
        failures = line.failures
        line.recover()
        table = self._coordinator.database.deliveries
        await self._coordinator.journal.commit(partial(table.remove, receiver.name, delivery.id), later=True)
        if attempt.outcome is Outcome.GONE:
            report_loss([delivery], f"the receiver {receiver.name} does not want it: {attempt.problem}")
        elif failures:
            log.info(f"the receiver {receiver.name} takes events again")
        if was_down:
            await self._hasten(receiver.name, most_tried=max(failures, DOWN_AFTER))

    async def _hasten(self, receiver: str, *, most_tried: int) -> None:
        """Let what waits for a receiver be sent at once, except what failed more often than the receiver did in a row."""
        table = self._coordinator.database.deliveries
        hasten = partial(table.hasten, receiver, now=time.time(), most_tried=most_tried)
        while await self._coordinator.journal.commit(hasten, later=True) >= BATCH:
            pass

    async def _postpone(self, receiver: Receiver, line: Line, delivery: Delivery, attempt: Attempt) -> None:
        if attempt.refuses_event:
            if delivery.attempts == 0:
                what = f"{delivery.type} of {delivery.export} ({delivery.id})"
                log.warning(f"the receiver {receiver.name} refuses {what}; it is sent again: {attempt.problem}")
        else:
            line.fail()
            self._report_problem(receiver, line, attempt.problem)
        down_pause = min(_pause(line.failures - DOWN_AFTER), _LONGEST_DOWN_PAUSE) if line.is_down else 0.0
        line.not_before = time.monotonic() + max(down_pause, attempt.pause_seconds)
        until = time.time() + max(_pause(delivery.attempts), attempt.pause_seconds)
        table = self._coordinator.database.deliveries
        change = partial(table.postpone, receiver.name, delivery.id, until=until)
        await self._coordinator.journal.commit(change, later=True)

    def _report_problem(self, receiver: Receiver, line: Line, problem: str) -> None:
        if problem != line.problem:
            line.problem = problem
            log.warning(f"the receiver {receiver.name} does not take events; they wait and are sent again: {problem}")


def _pause(attempts: int) -> float:
    """Return the seconds before the next attempt after some that failed; each another part of a pause that doubles, so that they spread."""
    longest = min(_FIRST_PAUSE * 2 ** min(attempts, 16), _LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - only spreads attempts
