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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from slipway.errors import ServiceError
from slipway.observability import metrics
from slipway.observability.metrics import reading
from slipway.texts import counted
from slipway_coordinator.coordinator import Coordinator
from slipway_coordinator.storage.deliveries import Delivery, Waiting
from slipway_coordinator.webhooks.posting import Attempt, Outcome, post
from slipway_coordinator.webhooks.receivers import Receiver, Webhooks

log = logging.getLogger("slipway.coordinator.webhooks")

LOOK_SECONDS = 1.0
_COUNT_SECONDS = 5.0
_TIDY_SECONDS = 60.0
MOST_AT_ONCE = 4
"""Deliveries of one receiver that are under way at a time."""
DOWN_AFTER = 3
"""Failures in a row after which a receiver is taken to be down."""
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 900.0
_LONGEST_DOWN_PAUSE = 60.0
"""Longest time between two attempts at a receiver that is down."""
_HOLD_SECONDS = 10.0
_OTHERS_KEPT_SECONDS = 72 * 3600.0


@dataclass
class _Line:
    """What is under way to one receiver, by the ids of events, and how its last attempts ended."""

    sending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    failures: int = 0
    problem: str = ""
    not_before: float = 0.0

    @property
    def is_down(self) -> bool:
        return self.failures >= DOWN_AFTER

    def room(self, now: float) -> int:
        """Return how many more deliveries may begin at a time of the monotonic clock."""
        most = 1 if self.is_down else MOST_AT_ONCE
        return most - len(self.sending) if now >= self.not_before else 0


class Sender:
    """Sends the deliveries of a coordinator, from :meth:`start` to :meth:`stop`.

    Args:
        coordinator: Has the table; it is started before, and stopped after this.
        webhooks: Returns the receivers of this moment.
    """

    def __init__(self, coordinator: Coordinator, webhooks: Callable[[], Webhooks]) -> None:
        self._coordinator = coordinator
        self._webhooks = webhooks
        self._lines: dict[str, _Line] = {}
        self._waiting: Mapping[str, Waiting] = {}
        self._freed: set[str] = set()  # receivers of which a delivery has ended since the last look
        self._woken = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._counted = self._tidied = 0.0

    def start(self) -> None:
        """Begin to send."""
        self._running = asyncio.create_task(self._run(), context=contextvars.Context())

    async def stop(self) -> None:
        """Stop at once; what was under way is sent again by the next coordinator."""
        tasks = [task for line in self._lines.values() for task in line.sending.values()]
        for task in (*filter(None, (self._running,)), *tasks):
            task.cancel()
        await asyncio.gather(*filter(None, (self._running,)), *tasks, return_exceptions=True)

    async def _run(self) -> None:
        with reading(self._samples):
            looked_at_all = -LOOK_SECONDS
            while True:
                freed, self._freed = self._freed, set()
                self._woken.clear()
                is_time = time.monotonic() >= looked_at_all + LOOK_SECONDS
                looked_at_all = time.monotonic() if is_time else looked_at_all
                try:
                    await self._look(None if is_time else freed)
                    await self._keep_house()
                except ServiceError as error:
                    log.warning(f"events cannot be sent now: {error}")
                except Exception:  # if this loop ended, nothing would ever be sent again
                    log.exception("sending events failed")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(looked_at_all + LOOK_SECONDS - time.monotonic()):
                        await self._woken.wait()

    async def _look(self, names: set[str] | None) -> None:
        """Begin the deliveries to these receivers (None: to all) that are due, as far as there is room."""
        for receiver in self._webhooks().receivers:
            if names is not None and receiver.name not in names:
                continue
            line = self._lines.setdefault(receiver.name, _Line())
            room = line.room(time.monotonic())
            if room <= 0:
                continue
            sending = set(line.sending)  # what arrives during the query may still be in its result
            due = await self._find_due(receiver.name, room + len(sending), least_tried=line.is_down)
            for delivery in [one for one in due if one.id not in sending][:room]:
                task = asyncio.create_task(self._send(receiver, line, delivery))
                line.sending[delivery.id] = task

    async def _find_due(self, receiver: str, most: int, *, least_tried: bool) -> list[Delivery]:
        table, now = self._coordinator.database.deliveries, time.time()
        find = partial(table.find_due, receiver, now=now, most=most, least_tried=least_tried)
        return await self._coordinator.call(find)

    async def _send(self, receiver: Receiver, line: _Line, delivery: Delivery) -> None:
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

    def _hold(self, line: _Line) -> None:
        """Send nothing for a while: what cannot be stored stays due, and would be sent again at once."""
        line.not_before = time.monotonic() + _HOLD_SECONDS

    async def _settle(self, receiver: Receiver, line: _Line, delivery: Delivery, attempt: Attempt) -> None:
        """Store how an attempt ended."""
        if attempt.outcome is Outcome.FAILED:
            await self._postpone(receiver, line, delivery, attempt)
            return
        was_down = line.is_down or delivery.attempts >= DOWN_AFTER
        if attempt.outcome is Outcome.GONE:
            _report_loss([delivery], f"the receiver {receiver.name} does not want it: {attempt.problem}")
        elif line.failures:
            log.info(f"the receiver {receiver.name} takes events again")
        line.failures, line.problem = 0, ""
        table, now = self._coordinator.database.deliveries, time.time()

        def remove() -> None:
            table.remove(receiver.name, delivery.id)
            if was_down:
                table.hasten(receiver.name, now=now)

        await self._coordinator.journal.commit(remove, later=True)

    async def _postpone(self, receiver: Receiver, line: _Line, delivery: Delivery, attempt: Attempt) -> None:
        line.failures += 1
        if attempt.problem != line.problem:
            line.problem = attempt.problem
            log.warning(
                f"the receiver {receiver.name} does not take events; they wait and are sent again: {attempt.problem}"
            )
        down_pause = min(_pause(line.failures - DOWN_AFTER), _LONGEST_DOWN_PAUSE) if line.is_down else 0.0
        line.not_before = time.monotonic() + max(down_pause, attempt.pause_seconds)
        until = time.time() + max(_pause(delivery.attempts), attempt.pause_seconds)
        table = self._coordinator.database.deliveries
        change = partial(table.postpone, receiver.name, delivery.id, until=until)
        await self._coordinator.journal.commit(change, later=True)

    async def _keep_house(self) -> None:
        """Count what waits, and give up what has waited for too long."""
        now, table = time.monotonic(), self._coordinator.database.deliveries
        if now >= self._counted + _COUNT_SECONDS:
            self._counted = now
            self._waiting = await self._coordinator.call(table.count_waiting)
        if now < self._tidied + _TIDY_SECONDS:
            return
        self._tidied = now
        receivers = self._webhooks().receivers
        for receiver in receivers:
            hours, down = receiver.entry.keep_hours, self._lines.setdefault(receiver.name, _Line()).is_down
            old = partial(table.give_up, receiver.name, before=time.time() - hours * 3600, untried=down)
            lost = await self._coordinator.journal.commit(old, later=True)
            _report_loss(lost, f"the receiver {receiver.name} did not take it within {hours:g} hours")
        names = [receiver.name for receiver in receivers]
        orphaned = partial(table.give_up_others, names, before=time.time() - _OTHERS_KEPT_SECONDS)
        lost = await self._coordinator.journal.commit(orphaned, later=True)
        _report_loss(lost, "the webhooks file does not name its receiver any more")

    def _samples(self) -> Iterator[metrics.Sample]:
        """Yield the gauges of this moment. Safe from any thread."""
        waiting, now = self._waiting, time.time()
        for name in sorted({*waiting, *self._lines}):
            number, oldest = waiting.get(name, Waiting(0, now))
            yield metrics.WEBHOOK_WAITING, {"receiver": name}, float(number)
            yield metrics.WEBHOOK_AGE, {"receiver": name}, max(now - oldest, 0.0)


def _pause(attempts: int) -> float:
    """Return the seconds before the next attempt after some that failed; each another part of a pause that doubles, so that they spread."""
    longest = min(_FIRST_PAUSE * 2 ** min(attempts, 16), _LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - only spreads attempts


def _report_loss(lost: list[Delivery], why: str) -> None:
    for delivery in lost:
        metrics.WEBHOOK_LOST.add(receiver=delivery.receiver)
    if lost:
        first, more = lost[0], len(lost) - 1
        others = f" and {counted(more, 'other event')}" if more else ""
        log.error(f"{first.type} of {first.export} ({first.id}){others} will not be sent: {why}")
