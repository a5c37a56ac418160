"""Changes of the state, in order and many to a transaction: what is asked for while one is committed makes up the next.

A change is durable when its caller is answered. Committing takes as long for one change as for a hundred, so a coordinator
under load answers a hundred callers in the time of one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway_coordinator.storage.database_faults import words

log = logging.getLogger("slipway.coordinator.journal")

T = TypeVar("T")
_Change = Callable[[], Any]

# Of each kind in one transaction: callers wait for the first, and shall not wait for long; the others go on meanwhile.
_MOST_SOON, _MOST_LATER = 64, 16

_PATIENCE_SECONDS, _PAUSE_SECONDS = 300.0, 0.5
_COMPLAINT_SECONDS = 10.0


class Transactions:
    """Transactions on a database that calls in the same thread join.

    Args:
        engine: The database.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._open = threading.local()

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """The transaction that is open in this thread, or one of its own that is committed at the end of the block.

        Whoever catches an error of the database inside it has to raise another: PostgreSQL takes nothing more, and would
        drop without a word what others have changed in it.
        """
        joined: sa.Connection | None = getattr(self._open, "connection", None)
        if joined is not None:
            yield joined
            return
        with self._engine.begin() as connection:
            self._open.connection = connection
            try:
                yield connection
            finally:
                self._open.connection = None


class Journal:
    """Carries changes out one after another, those of a kind in the order in which they were asked for. Used on one event loop.

    Args:
        transactions: Where they are carried out, in a thread of the journal's.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipway-journal")
        self._soon: deque[tuple[_Change, asyncio.Future[Any]]] = deque()
        self._later: deque[tuple[_Change, asyncio.Future[Any]]] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def do(self, change: Callable[[], T], *, later: bool = False) -> T:
        """Carry out a change: what it answers, once that is durable.

        Args:
            change: Uses the transactions of this journal; carried out again when another change of its transaction failed, or
                when nobody knows whether it was committed.
            later: Let changes that clients and workers wait for go first, and be patient; for workflows.

        Raises:
            ServiceError: reason ``COORDINATOR_UNAVAILABLE`` when the database does not answer; callers try again.
        """
        if later:
            return await patiently(lambda: self._asked(change, self._later))
        return await self._asked(change, self._soon)

    async def _asked(self, change: Callable[[], T], queue: deque[tuple[_Change, asyncio.Future[Any]]]) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        queue.append((change, answer))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return await answer

    def close(self) -> None:
        """Carry nothing out any more."""
        self._thread.shutdown()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._soon or self._later:
                batch = [self._soon.popleft() for _ in range(min(len(self._soon), _MOST_SOON))]
                batch += [self._later.popleft() for _ in range(min(len(self._later), _MOST_LATER))]
                changes = [change for change, _ in batch]
                results = await loop.run_in_executor(self._thread, self._carry_out, changes)
                for (_, answer), result in zip(batch, results, strict=True):
                    if answer.cancelled():
                        continue
                    if isinstance(result, BaseException):
                        answer.set_exception(result)
                    else:
                        answer.set_result(result)
        finally:
            self._writing = None

    def _carry_out(self, changes: Sequence[_Change]) -> list[Any]:
        """What each change answers or raises."""
        try:
            return answering(lambda: self._together(changes))
        except ServiceError as error:
            return [error] * len(changes)
        except Exception as error:  # noqa: BLE001 - a fault in one of them: the others do not suffer from it
            if len(changes) == 1:
                return [error]
        return [result for change in changes for result in self._carry_out([change])]

    def _together(self, changes: Sequence[_Change]) -> list[Any]:
        with self._transactions.begin():
            return [change() for change in changes]


_under_way: set[asyncio.Task[Any]] = set()  # asyncio itself forgets tasks that nobody else holds


async def to_its_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Carry out a change and what follows from it in memory, even if who asked for it goes away meanwhile."""
    task = asyncio.create_task(coroutine)
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)
    return await asyncio.shield(task)


async def patiently(attempt: Callable[[], Awaitable[T]]) -> T:
    """Make an attempt again while the database does not answer: clients and workers do so themselves, workflows cannot.

    Raises:
        ServiceError: reason ``COORDINATOR_UNAVAILABLE`` after some minutes.
    """
    give_up = time.monotonic() + _PATIENCE_SECONDS
    told = False
    while True:
        try:
            return await attempt()
        except ServiceError as error:
            if error.reason != "COORDINATOR_UNAVAILABLE" or time.monotonic() >= give_up:
                raise
            if not told:
                log.warning(f"a workflow waits: {error.message}")
                told = True
        await asyncio.sleep(_PAUSE_SECONDS)


def answering(function: Callable[[], T]) -> T:
    """Make a call on a database.

    Raises:
        ServiceError: reason ``COORDINATOR_UNAVAILABLE`` when the database does not answer; callers try again.
    """
    try:
        return function()
    except sa.exc.DBAPIError as error:
        if not (isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError) or error.connection_invalidated):
            raise
        _complaints.about(error)
        raise ServiceError(
            "the coordinator's database does not answer", remedy="try again; the coordinator's log says why"
        ) from error


class _Complaints:
    """Logs why the database does not answer: at once when that is new, and the same again only after a while, as everybody asks."""

    def __init__(self) -> None:
        self._last = ("", 0.0)

    def about(self, error: BaseException) -> None:
        """Log what the driver says; may be called from any thread."""
        said, now = words(error), time.monotonic()
        before, at = self._last
        if said != before or now >= at + _COMPLAINT_SECONDS:
            self._last = (said, now)
            log.warning(f"the database does not answer: {said}")


_complaints = _Complaints()
