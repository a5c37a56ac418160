"""The database of a coordinator's state: its address, and its errors as ``ServiceError`` and as one line for the log.

The state is the coordinator's own SQLite file, or a PostgreSQL database that it shares with standbys.

When a server refuses a connection, the driver gives only a message, in the server's language. So we ask the server whether it
takes connections at all: if it does, it refuses this one, and waiting will not help.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway.files.regular_file import open_regular
from slipway_coordinator.storage import migrations
from slipway_coordinator.storage.state_file import check_database_files

_KEYWORDS = re.compile(r"\s*(?:host|hostaddr|port|dbname|user|password|passfile|service)\s*=")
"""libpq's other notation of an address. As a path it would be a file with the password in its name; write ``./`` before such a path."""
_SECRET_PARAMETERS = ("password", "sslpassword")
_SQLITE_HEADER = b"SQLite format 3\0"
_SECRETS = re.compile(r"(?<=:)[^:@/\s]+(?=@)|(?<=password=)('[^']*'|\S+)", re.IGNORECASE)

# SQLSTATE of: a refused connection, a missing database, a missing privilege, a read-only replica.
_DENIED = re.compile("28...|3D000|42501|25006")
# A server without free connections, which is temporary. Said in another language, it counts as a refusal.
_FULL = re.compile("too many (clients|connections)|connection slots")
_DENIED_BY_SQLITE = {"SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH"}


@dataclass(frozen=True, slots=True)
class SqliteState:
    """A file that one coordinator uses; the coordinator itself migrates its tables."""

    path: Path
    shared: ClassVar[bool] = False

    @property
    def url(self) -> str:
        """URL for SQLAlchemy."""
        return sa.URL.create("sqlite", database=str(self.path)).render_as_string()

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class PostgresState:
    """A database that several coordinators share, one of them active. ``slipway coordinator migrate`` migrates its tables.

    Connections are direct: the lock and notifications belong to a session, which a pooler in transaction mode does not keep.
    """

    address: sa.URL
    shared: ClassVar[bool] = True

    @property
    def url(self) -> str:
        """URL for SQLAlchemy. It has the password: never log it."""
        return self.address.render_as_string(hide_password=False)

    def __str__(self) -> str:
        shown = self.address.set(drivername="postgresql").difference_update_query(_SECRET_PARAMETERS)
        return shown.render_as_string(hide_password=True)


State = SqliteState | PostgresState


def state_at(place: str) -> State:
    """Return the state at a path or ``postgresql://`` URL.

    Raises:
        ServiceError: reason ``REQUEST_INVALID`` for another kind of URL, or a file that is not a database or cannot be written.
    """
    if _KEYWORDS.match(place):
        raise _unusable_error("the state is a list of PostgreSQL's keywords")
    if "://" not in place:
        return SqliteState(_database_file(Path(place).resolve()))
    try:
        address = sa.make_url(place)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise _unusable_error("the state's URL cannot be read") from error
    if address.get_backend_name() not in {"postgresql", "postgres"}:
        raise _unusable_error(f"the state's URL is of the kind {address.drivername}")
    if "@" in (address.host or "") + (address.database or ""):  # part of a password that would be shown and logged
        raise _unusable_error(
            "the state's URL has more than one @, or a / before it: write %40 and %2F for those in a password"
        )
    _check_parameters(address)
    return PostgresState(address.set(drivername="postgresql+psycopg"))


def _check_parameters(address: sa.URL) -> None:
    """Refuse unknown connection parameters now: later they would only look like an unavailable database."""
    from psycopg import ProgrammingError, conninfo

    try:
        conninfo.conninfo_to_dict(address.set(drivername="postgresql").render_as_string(hide_password=False))
    except ProgrammingError as error:
        raise _unusable_error(f"the state's URL cannot be used: {str(error).strip()}") from None


def _database_file(path: Path) -> Path:
    """Check that a path is, or can become, a SQLite database with other files beside it."""
    try:
        check_database_files(path)
        with open_regular(path) as file:
            start = file.read(len(_SQLITE_HEADER))
    except FileNotFoundError as error:
        if not path.parent.is_dir():  # most likely a misspelt path: a new state would have none of the exports
            raise _unusable_error(f"the state's folder {path.parent} does not exist") from error
        start = b""
    except OSError as error:
        raise _unusable_error(f"{path} cannot be used as a state file ({error.strerror})") from error
    if not all(os.access(place, os.W_OK) for place in (path, path.parent) if place.exists()):
        raise _unusable_error(f"{path} cannot be written")
    if start and start != _SQLITE_HEADER:
        raise _unusable_error(f"{path} is not a SQLite database")
    return path


def _unusable_error(problem: str) -> ServiceError:
    return ServiceError(
        problem,
        reason="REQUEST_INVALID",
        remedy="give postgresql://USER@HOST/DATABASE, or the path of a file",
        about={"field": "state"},
    )


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
