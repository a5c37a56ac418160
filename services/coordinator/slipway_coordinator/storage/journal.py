"""Group commit: changes of the state are applied in order; those requested during one transaction make up the next.

A change is durable when its call returns. A commit of a hundred changes takes as long as a commit of one, so a coordinator under
load serves a hundred callers in the time of one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway_coordinator.storage.database_access import driver_message

log = logging.getLogger("slipway.coordinator.journal")

P = ParamSpec("P")
T = TypeVar("T")
_Change = Callable[[], Any]

# Limits per transaction: clients and workers wait for changes of the first kind, so few of the second kind may delay them.
_MOST_SOON, _MOST_LATER = 64, 16

_PATIENCE_SECONDS, _PAUSE_SECONDS = 300.0, 0.5
_COMPLAINT_SECONDS = 10.0


class Transactions:
    """Database transactions that nested calls in the same thread join.

    Args:
        engine: The database.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._open = threading.local()

    def write_at_end(self, write: Callable[[sa.Connection, list[Any]], None], row: Any) -> None:
        """Call ``write`` once before the open transaction is committed, with this row and all others given for it, in their order.

        A transaction of the journal has many changes, and writing rows of a kind together costs a fraction of writing each alone.
        """
        self._open.rows.setdefault(write, []).append(row)

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """Join the transaction open in this thread, or open one and commit it at the end of the block.

        Code that catches a database error inside it must raise another: PostgreSQL accepts nothing more in the transaction and
        would silently drop the changes of others in it.
        """
        joined: sa.Connection | None = getattr(self._open, "connection", None)
        if joined is not None:
            yield joined
            return
        with self._engine.begin() as connection:
            self._open.connection, self._open.rows = connection, {}
            try:
                yield connection
                for write, rows in self._open.rows.items():
                    write(connection, rows)
            finally:
                self._open.connection = None


class Journal:
    """Applies changes one after another, those of a kind in the order of their calls. Used on one event loop.

    Args:
        transactions: Used for the changes, in a thread of the journal.
        on_commit: Called on the event loop after every transaction, before the next one begins.
    """

    def __init__(self, transactions: Transactions, *, on_commit: Callable[[], None] = lambda: None) -> None:
        self._transactions = transactions
        self._on_commit = on_commit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipway-journal")
        self._soon: deque[tuple[_Change, asyncio.Future[Any]]] = deque()
        self._later: deque[tuple[_Change, asyncio.Future[Any]]] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def commit(self, change: Callable[[], T], *, later: bool = False) -> T:
        """Apply a change and return its result once that is durable.

        Args:
            change: Uses the transactions of this journal. It runs again if another change of its transaction failed, or if it is
                unknown whether the transaction was committed.
            later: For workflows: let changes that clients and workers wait for go first, and retry while the database is unavailable.

        Raises:
            ServiceError: reason ``COORDINATOR_UNAVAILABLE`` if the database is unavailable; callers try again.
        """
        if later:
            return await retry_until_available(lambda: self._enqueue(change, self._later))
        return await self._enqueue(change, self._soon)

    async def _enqueue(self, change: Callable[[], T], queue: deque[tuple[_Change, asyncio.Future[Any]]]) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        queue.append((change, answer))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return await answer

    def close(self) -> None:
        """Stop applying changes."""
        self._thread.shutdown()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._soon or self._later:
                batch = [self._soon.popleft() for _ in range(min(len(self._soon), _MOST_SOON))]
                batch += [self._later.popleft() for _ in range(min(len(self._later), _MOST_LATER))]
                changes = [change for change, _ in batch]
                results = await loop.run_in_executor(self._thread, self._apply, changes)
                self._on_commit()
                for (_, answer), result in zip(batch, results, strict=True):
                    if answer.cancelled():
                        continue
                    if isinstance(result, BaseException):
                        answer.set_exception(result)
                    else:
                        answer.set_result(result)
        finally:
            self._writing = None

    def _apply(self, changes: Sequence[_Change]) -> list[Any]:
        """Apply the changes in one transaction; return each change's result or exception."""
        try:
            return translate_database_errors(lambda: self._apply_together(changes))
        except ServiceError as error:
            return [error] * len(changes)
        except Exception as error:  # noqa: BLE001 - a fault in one change: the others are applied one by one
            if len(changes) == 1:
                return [error]
        return [result for change in changes for result in self._apply([change])]

    def _apply_together(self, changes: Sequence[_Change]) -> list[Any]:
        with self._transactions.begin():
            return [change() for change in changes]


_under_way: set[asyncio.Task[Any]] = set()  # asyncio holds only weak references to tasks


def shield(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine function to run to its end even if its caller is cancelled, so that memory stays in step with the database."""

    @functools.wraps(function)
    async def run(*arguments: P.args, **more: P.kwargs) -> T:
        task = asyncio.create_task(function(*arguments, **more))
        _under_way.add(task)
        task.add_done_callback(_under_way.discard)
        return await asyncio.shield(task)

    return run


async def retry_until_available(attempt: Callable[[], Awaitable[T]]) -> T:
    """Retry while the database is unavailable (workflows only: clients and workers retry themselves).

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


def translate_database_errors(function: Callable[[], T]) -> T:
    """Call a function; raise ``ServiceError`` if the database is unavailable.

    Raises:
        ServiceError: reason ``COORDINATOR_UNAVAILABLE``; callers try again.
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
    """Logs why the database is unavailable: a new cause at once, the same cause again only after a while, as every call reports it."""

    def __init__(self) -> None:
        self._last = ("", 0.0)

    def about(self, error: BaseException) -> None:
        """Log the driver's message. Safe from any thread."""
        said, now = driver_message(error), time.monotonic()
        before, at = self._last
        if said != before or now >= at + _COMPLAINT_SECONDS:
            self._last = (said, now)
            log.warning(f"the database does not answer: {said}")


_complaints = _Complaints()
