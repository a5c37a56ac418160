"""What a sender knows of each receiver: what is under way to it, and whether it is down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipway.observability import metrics
from slipway.texts import counted
from slipway_coordinator.storage.deliveries import Delivery

log = logging.getLogger("slipway.coordinator.webhooks")

MOST_AT_ONCE = 4
"""Deliveries of one receiver that are under way at a time."""
DOWN_AFTER = 3
"""Failures in a row after which a receiver is taken to be down."""


@dataclass
class Line:
    """What is under way to one receiver, by the ids of events, and how its last attempts ended.

    Attributes:
        sending: What is under way.
        failures: How many of the last attempts failed through the receiver, in a row.
        problem: Why the last one failed.
        not_before: When the next one may begin, by the monotonic clock.
        down_since: Since when the receiver is down, by the monotonic clock.
    """

    sending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    failures: int = 0
    problem: str = ""
    not_before: float = 0.0
    down_since: float | None = None

    @property
    def is_down(self) -> bool:
        """Whether so many attempts failed in a row that it gets one event at a time."""
        return self.failures >= DOWN_AFTER

    def fail(self) -> None:
        """Count a failure of the receiver."""
        self.failures += 1
        if self.is_down and self.down_since is None:
            self.down_since = time.monotonic()

    def recover(self) -> None:
        """Forget the failures: the receiver has responded as it should."""
        self.failures, self.problem, self.down_since = 0, "", None

    def room(self, now: float) -> int:
        """Return how many more deliveries may begin at a time of the monotonic clock."""
        most = 1 if self.is_down else MOST_AT_ONCE
        return most - len(self.sending) if now >= self.not_before else 0


def report_loss(lost: Sequence[Delivery], why: str) -> None:
    """Log and count events that will not be sent."""
    for delivery in lost:
        metrics.WEBHOOK_LOST.add(receiver=delivery.receiver)
    if lost:
        first, more = lost[0], len(lost) - 1
        others = f" and {counted(more, 'other event')}" if more else ""
        log.error(f"{first.type} of {first.export} ({first.id}){others} will not be sent: {why}")
