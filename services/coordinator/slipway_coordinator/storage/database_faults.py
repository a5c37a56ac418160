"""What a database says when it does not do what it is asked: as an error that names it, and as a line for the log.

A server that refuses a connection says why in the language it was set up for, and the driver tells nothing else. So the server
is asked whether it takes connections at all: if it does, it does not take this one, and waiting will not help.
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

# SQLSTATE: of a connection that is refused, of a database that is not there, of a missing privilege, of a read-only replica.
_DENIED = re.compile("28...|3D000|42501|25006")
# Of a server without a connection left, which passes; one that says so in another language is taken to refuse.
_FULL = re.compile("too many (clients|connections)|connection slots")
_DENIED_BY_SQLITE = {"SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH"}


def words(error: BaseException) -> str:
    """The first line of what the driver says, without secrets, and without the statement and its values."""
    said = str(getattr(error, "orig", None) or error).strip()
    return _SECRETS.sub("***", said.partition("\n")[0])


@contextmanager
def faults_of(state: State) -> Iterator[None]:
    """Begin to use the database of a state in a block that fails with what the database says.

    Raises:
        ServiceError: reason ``STATE_DENIED`` when it refuses this program, ``STATE_SCHEMA`` when its tables are not what they
            should be, ``COORDINATOR_UNAVAILABLE`` when it does not answer.
    """
    try:
        yield
    except sa.exc.DBAPIError as error:
        if isinstance(state, PostgresState):
            raise _postgres_fault(error, state) from error
        raise _sqlite_fault(error, state) from error


def enter(state: State) -> None:
    """See that the server of a shared state lets this program in and has its tables; one that does not answer is waited for later.

    Raises:
        ServiceError: reason ``STATE_DENIED`` or ``STATE_SCHEMA``.
    """
    if not isinstance(state, PostgresState):
        return
    engine = sa.create_engine(state.url, connect_args={"connect_timeout": 3})
    try:
        with faults_of(state):
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
            return _silent(error, state)
        return _wrong_tables(error, state, remedy="see what else uses the database, or restore a backup of it")
    if code in {"42501", "25006"}:
        remedy = (
            "migrate with a role that owns the database, and serve with one that may read and change all tables "
            "in the schemas public and dbos of the primary"
        )
    elif code or (_FULL.search(words(error)) is None and _takes_connections(state)):
        remedy = "check user, password and database in the state's URL, and that both were made on the server"
    else:
        return _silent(error, state)
    about = {"user": state.address.username, "host": state.address.host, "database": state.address.database}
    return ServiceError(
        f"the state's database {state} refuses: {words(error)}", reason="STATE_DENIED", remedy=remedy, about=about
    )


def _takes_connections(state: PostgresState) -> bool:
    from psycopg import conninfo, pq

    address = state.address.set(drivername="postgresql").render_as_string(hide_password=False)
    return pq.PGconn.ping(conninfo.make_conninfo(address, connect_timeout=3).encode()) == pq.Ping.OK


def _sqlite_fault(error: sa.exc.DBAPIError, state: State) -> ServiceError:
    name = error.orig.sqlite_errorname if isinstance(error.orig, sqlite3.Error) else ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return ServiceError(
            f"another program holds the state {state}: {words(error)}",
            reason="COORDINATOR_UNAVAILABLE",
            remedy="end it, or wait for it",
            about={"file": state},
        )
    if any(name.startswith(denied) for denied in _DENIED_BY_SQLITE):
        return ServiceError(
            f"the state {state} cannot be written: {words(error)}",
            reason="STATE_DENIED",
            remedy="let this user write the file and its folder",
            about={"file": state},
        )
    if isinstance(error, sa.exc.OperationalError):
        return _silent(error, state)
    return _wrong_tables(error, state, remedy="restore a backup of the file, or begin anew with another")


def _silent(error: sa.exc.DBAPIError, state: State) -> ServiceError:
    return ServiceError(
        f"the state's database {state} does not answer: {words(error)}",
        remedy="see that it runs and can be reached from here, and try again",
    )


def _wrong_tables(error: sa.exc.DBAPIError, state: State, *, remedy: str) -> ServiceError:
    return ServiceError(
        f"the tables of {state} cannot be used: {words(error)}",
        reason="STATE_SCHEMA",
        remedy=remedy,
    )
