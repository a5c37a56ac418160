"""Turns for what a server does only a few times at once: limited in total, fair among projects and their principals."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Waiter:
    project: str
    principal: str
    granted: asyncio.Future[None]


class Turns:
    """Turns given in rotation to the waiting projects. All methods run on one event loop.

    A project gets another turn only while it holds fewer than are free. So a project alone gets half of all turns, the next one
    half of the rest, and with 16 turns the sixth project is the first that must wait for others. (This is the rule of dynamic
    thresholds for shared memory switches: Choudhury and Hahne, 1998, with a factor of 1.)

    Args:
        at_once: Number of turns.
        each: Most turns of one principal.
    """

    def __init__(self, at_once: int, *, each: int) -> None:
        self._free = at_once
        self._each = each
        self._of_project: Counter[str] = Counter()
        self._of_principal: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Waiter]] = {}  # by project, in the order in which they come next

    @property
    def busy(self) -> int:
        """Number of turns held."""
        return self._of_project.total()

    @property
    def free(self) -> int:
        """Number of turns that nobody holds."""
        return self._free

    @contextlib.asynccontextmanager
    async def one(self, principal: str, *, project: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it within a block."""
        waiter = _Waiter(project, principal, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(project, deque()).append(waiter)
        self._grant()
        try:
            await waiter.granted
            yield
        finally:
            if waiter.granted.cancelled():
                self._dequeue(waiter)
            else:
                self._take(waiter, -1)
            self._grant()

    def _grant(self) -> None:
        while (waiter := self._next()) is not None:
            self._dequeue(waiter)
            if waiter.project in self._waiting:
                self._waiting[waiter.project] = self._waiting.pop(waiter.project)  # behind the other projects
            self._take(waiter, 1)
            waiter.granted.set_result(None)

    def _next(self) -> _Waiter | None:
        for project, waiters in self._waiting.items():
            if self._of_project[project] < self._free:
                for waiter in waiters:
                    if self._of_principal[waiter.principal] < self._each and not waiter.granted.done():
                        return waiter
        return None

    def _dequeue(self, waiter: _Waiter) -> None:
        waiters = self._waiting[waiter.project]
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[waiter.project]

    def _take(self, waiter: _Waiter, count: int) -> None:
        self._free -= count
        for counter, key in ((self._of_project, waiter.project), (self._of_principal, waiter.principal)):
            counter[key] += count
            if not counter[key]:
                del counter[key]
