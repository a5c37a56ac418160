"""Locks of a state: a file's, or for PostgreSQL an advisory lock that lives and dies with one connection."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable

import psycopg
import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway.reasons import REASONS
from slipway_coordinator.leadership.file_lock import FileLock, StateLock
from slipway_coordinator.storage.database_access import PostgresState, State, driver_message

log = logging.getLogger("slipway.coordinator.lock")

LOCK_KEY = 0x51_1B_3A_17  # arbitrary, but the same in every coordinator
_CHECK_MILLISECONDS = 1000
_LONGEST_NAME = 63  # PostgreSQL cuts longer names of connections

_ANNOUNCEMENT = "slipway-leader "
"""Prefix of the name of the lock's connection. The holder's address follows, so it disappears with the lock."""

_HOLDER = """
    SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)
    WHERE l.locktype = 'advisory' AND l.granted AND l.classid = 0 AND l.objid = %s AND l.objsubid = 1
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

# The client notices a dead network first (2 + 2 × 1 s) and the server frees the lock after that (3 + 3 × 1 s), so two
# coordinators are never active at the same time.
_CLIENT_OPTIONS = {
    "connect_timeout": 3,
    "keepalives": 1,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 2,
    "tcp_user_timeout": 4000,
    "application_name": "slipway-coordinator-lock",
}
_SERVER_SETTINGS = {
    "tcp_keepalives_idle": 3,
    "tcp_keepalives_interval": 1,
    "tcp_keepalives_count": 3,
    "idle_session_timeout": 0,
}


def lock_of(state: State) -> StateLock:
    """Return the lock that makes its holder the only active coordinator of a state."""
    return AdvisoryLock(state.address) if isinstance(state, PostgresState) else FileLock(state.path)


def end_process(error: Exception) -> None:
    """End this process at once, without cleaning up: another coordinator may be active already."""
    log.critical(f"the lock is lost, so this coordinator ends: {error}")
    logging.shutdown()
    os._exit(REASONS["COORDINATOR_LOCKED"].category.exit_code)


class AdvisoryLock:
    """A lock held for as long as its connection lives; the connection is checked once a second.

    Args:
        address: The database; connected to directly, as a pooler would share the connection.
        on_lost: Called in a thread of its own when the connection ends while the lock is held.

    Attributes:
        answers: Whether the database responded last time.
        leader: The address that another holder announced; empty if it announced none.
        near_database: The address of this machine that the database sees.
    """

    def __init__(self, address: sa.URL, *, on_lost: Callable[[Exception], None] = end_process) -> None:
        self._address = address.set(drivername="postgresql")
        self._on_lost = on_lost
        self._connection: psycopg.Connection | None = None
        self._released = threading.Event()
        self._problem = ""
        self.answers = False
        self.leader = ""
        self.near_database = ""

    def acquire(self) -> bool:
        """Take the lock if it is free; return whether this process holds it. An unavailable database counts as not acquired."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            row = self._connection.execute("SELECT pg_try_advisory_lock(%s)", (LOCK_KEY,)).fetchone()
            self.leader = "" if row is not None and row[0] else self._find_leader(self._connection)
            self.answers = True
        except psycopg.OperationalError as error:
            self._note(f"{self} does not answer: {driver_message(error)}")
            self.answers = False
            self._close()
            return False
        if row is None or not row[0]:
            self._note(f"another coordinator is active on {self}")
            return False
        self._released.clear()
        threading.Thread(target=self._watch, args=(self._connection,), name="slipway-lock", daemon=True).start()
        return True

    def announce(self, address: str) -> None:
        """Announce to standbys the address of the active coordinator. The caller holds the lock.

        Raises:
            ServiceError: reason ``REQUEST_INVALID`` for an address that is too long.
        """
        name = _ANNOUNCEMENT + address
        if len(name.encode()) > _LONGEST_NAME:
            raise ServiceError(
                f"the address for standbys is {address!r}",
                reason="REQUEST_INVALID",
                remedy=f"give an --advertise of at most {_LONGEST_NAME - len(_ANNOUNCEMENT)} bytes, such as an IP address",
                about={"address": address},
            )
        assert self._connection is not None
        with contextlib.suppress(psycopg.OperationalError):  # the lock is lost, which ends this process
            self._connection.execute("SELECT set_config('application_name', %s, false)", (name,))

    def release(self) -> None:
        """Release the lock if this process holds it."""
        self._released.set()
        self._close()

    def refusal(self) -> ServiceError:
        """Return the error that says why :meth:`acquire` did not take the lock."""
        return ServiceError(self._problem, reason="COORDINATOR_LOCKED", remedy="wait until it ends, or end it")

    def __str__(self) -> str:
        return str(PostgresState(self._address))

    def _connect(self) -> psycopg.Connection:
        address = self._address.render_as_string(hide_password=False)
        connection = psycopg.connect(address, autocommit=True, **_CLIENT_OPTIONS)  # type: ignore[arg-type]
        for name, value in _SERVER_SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, str(value)))
        with socket.socket(fileno=os.dup(connection.fileno())) as plain:
            self.near_database = "" if plain.family == socket.AF_UNIX else str(plain.getsockname()[0])
        return connection

    def _find_leader(self, connection: psycopg.Connection) -> str:
        """Return the address that the lock's holder announced; empty if none."""
        row = connection.execute(_HOLDER, (LOCK_KEY,)).fetchone()
        name = str(row[0]) if row is not None else ""
        return name.removeprefix(_ANNOUNCEMENT) if name.startswith(_ANNOUNCEMENT) else ""

    def _watch(self, connection: psycopg.Connection) -> None:
        """Check the connection until the lock is released. A server that stops closes it, which poll notices at once."""
        poller = select.poll()
        poller.register(connection.fileno(), select.POLLIN)
        while not self._released.is_set():
            poller.poll(_CHECK_MILLISECONDS)
            try:
                connection.execute("SELECT 1")
            except psycopg.Error as error:
                if not self._released.is_set():
                    self._on_lost(error)
                return

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            log.info(problem)
        self._problem = problem

    def _close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
            self._connection = None
