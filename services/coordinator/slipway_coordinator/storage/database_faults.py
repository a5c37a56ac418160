"""Translate a database's errors into ``ServiceError``, and into one line for the log.

When a server refuses a connection, the driver gives only a message, in the server's language. So we ask the server whether it
takes connections at all: if it does, it refuses this one, and waiting will not help.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway_coordinator.storage import migrations
from slipway_coordinator.storage.database_address import PostgresState, State

_SECRETS = re.compile(r"(?<=:)[^:@/\s]+(?=@)|(?<=password=)('[^']*'|\S+)", re.IGNORECASE)

# SQLSTATE of: a refused connection, a missing database, a missing privilege, a read-only replica.
_DENIED = re.compile("28...|3D000|42501|25006")
# A server without free connections, which is temporary. Said in another language, it counts as a refusal.
_FULL = re.compile("too many (clients|connections)|connection slots")
_DENIED_BY_SQLITE = {"SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH"}


def driver_message(error: BaseException) -> str:
    """Return the first line of the driver's message, without secrets, the statement and its values."""
    said = str(getattr(error, "orig", None) or error).strip()
    return _SECRETS.sub("***", said.partition("\n")[0])


@contextmanager
def translate_startup_errors(state: State) -> Iterator[None]:
    """Translate the database's errors into ``ServiceError`` within a block.

    Raises:
        ServiceError: reason ``STATE_DENIED`` if the database refuses this program, ``STATE_SCHEMA`` if its tables are wrong,
            ``COORDINATOR_UNAVAILABLE`` if it does not answer.
    """
    try:
        yield
    except sa.exc.DBAPIError as error:
        if isinstance(state, PostgresState):
            raise _postgres_fault(error, state) from error
        raise _sqlite_fault(error, state) from error


def check_access(state: State) -> None:
    """Check that the server of a shared state accepts this program and has its tables. An unavailable server is no error here.

    Raises:
        ServiceError: reason ``STATE_DENIED`` or ``STATE_SCHEMA``.
    """
    if not isinstance(state, PostgresState):
        return
    engine = sa.create_engine(state.url, connect_args={"connect_timeout": 3})
    try:
        with translate_startup_errors(state):
            migrations.check(engine)
    except ServiceError as fault:
        if fault.reason in {"STATE_DENIED", "STATE_SCHEMA"}:
            raise
    finally:
        engine.dispose()


def _postgres_fault(error: sa.exc.DBAPIError, state: PostgresState) -> ServiceError:
    code = getattr(error.orig, "sqlstate", None) or ""
    if code and not _DENIED.fullmatch(code):
        if isinstance(error, (sa.exc.OperationalError, sa.exc.InterfaceError)):
            return _unavailable_error(error, state)
        return _wrong_tables_error(
            error, state, remedy="check which other program uses the database, or restore a backup of it"
        )
    if code in {"42501", "25006"}:
        remedy = (
            "migrate with a role that owns the database, and serve with one that may read and change all tables "
            "in the schemas public and dbos of the primary"
        )
    elif code or (_FULL.search(driver_message(error)) is None and _takes_connections(state)):
        remedy = "check user, password and database in the state's URL, and that user and database exist on the server"
    else:
        return _unavailable_error(error, state)
    about = {"user": state.address.username, "host": state.address.host, "database": state.address.database}
    return ServiceError(
        f"the state's database {state} refuses: {driver_message(error)}",
        reason="STATE_DENIED",
        remedy=remedy,
        about=about,
    )


def _takes_connections(state: PostgresState) -> bool:
    from psycopg import conninfo, pq

    address = state.address.set(drivername="postgresql").render_as_string(hide_password=False)
    return pq.PGconn.ping(conninfo.make_conninfo(address, connect_timeout=3).encode()) == pq.Ping.OK


def _sqlite_fault(error: sa.exc.DBAPIError, state: State) -> ServiceError:
    name = error.orig.sqlite_errorname if isinstance(error.orig, sqlite3.Error) else ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return ServiceError(
            f"another program holds the state {state}: {driver_message(error)}",
            reason="COORDINATOR_UNAVAILABLE",
            remedy="wait until it ends, or end it",
            about={"file": state},
        )
    if any(name.startswith(denied) for denied in _DENIED_BY_SQLITE):
        return ServiceError(
            f"the state {state} cannot be written: {driver_message(error)}",
            reason="STATE_DENIED",
            remedy="let this user write the file and its folder",
            about={"file": state},
        )
    if isinstance(error, sa.exc.OperationalError):
        return _unavailable_error(error, state)
    return _wrong_tables_error(error, state, remedy="restore a backup of the file, or start with a new file")


def _unavailable_error(error: sa.exc.DBAPIError, state: State) -> ServiceError:
    return ServiceError(
        f"the state's database {state} does not answer: {driver_message(error)}",
        remedy="check that it runs and can be reached from here, and try again",
    )


def _wrong_tables_error(error: sa.exc.DBAPIError, state: State, *, remedy: str) -> ServiceError:
    return ServiceError(
        f"the tables of {state} cannot be used: {driver_message(error)}",
        reason="STATE_SCHEMA",
        remedy=remedy,
    )
