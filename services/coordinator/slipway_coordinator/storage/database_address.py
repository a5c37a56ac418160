"""Address of a coordinator's state: its own SQLite file, or a PostgreSQL database shared with standbys."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway.files.regular_file import open_regular
from slipway_coordinator.storage.database_files import check_database_files


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

_KEYWORDS = re.compile(r"\s*(?:host|hostaddr|port|dbname|user|password|passfile|service)\s*=")
"""libpq's other notation of an address. As a path it would be a file with the password in its name; write ``./`` before such a path."""
_SECRET_PARAMETERS = ("password", "sslpassword")
_SQLITE = b"SQLite format 3\0"


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
            start = file.read(len(_SQLITE))
    except FileNotFoundError as error:
        if not path.parent.is_dir():  # most likely a misspelt path: a new state would have none of the exports
            raise _unusable_error(f"the state's folder {path.parent} does not exist") from error
        start = b""
    except OSError as error:
        raise _unusable_error(f"{path} cannot be used as a state file ({error.strerror})") from error
    if not all(os.access(place, os.W_OK) for place in (path, path.parent) if place.exists()):
        raise _unusable_error(f"{path} cannot be written")
    if start and start != _SQLITE:
        raise _unusable_error(f"{path} is not a SQLite database")
    return path


def _unusable_error(problem: str) -> ServiceError:
    return ServiceError(
        problem,
        reason="REQUEST_INVALID",
        remedy="give postgresql://USER@HOST/DATABASE, or the path of a file",
        about={"field": "state"},
    )
