"""Read the exports of a state file that may be in use, without taking its lock or changing it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pydantic
import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway_coordinator.model.records import ExportRecord
from slipway_coordinator.storage.database_address import check_database_files
from slipway_coordinator.storage.filters import parse_filter
from slipway_coordinator.storage.schema import exports

_BUSY_SECONDS = 5
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def read_exports(state: Path, *, filter: str = "") -> list[ExportRecord]:  # noqa: A002 - the field's name everywhere
    """Return the exports in a SQLite state, newest first; none if it has no tables yet.

    Args:
        state: The file.
        filter: As for a list at a coordinator; empty matches all.

    Raises:
        ServiceError: ``STATE_SCHEMA`` when it cannot be read; ``REQUEST_INVALID`` for a filter that is not understood.
    """
    documents = _documents(state, *parse_filter(filter)) or []
    try:
        return [ExportRecord.from_json(document) for document in documents]
    except pydantic.ValidationError as error:
        raise _unreadable(state, "an export in it was written by another version of Slipway") from error


def digests_named(state: Path, *, running: bool) -> frozenset[str] | None:
    """Return every digest that the exports in use name, whichever version of Slipway wrote them; None of a state without tables.

    Args:
        state: The file.
        running: Whether a process has it open. That process may be delivering an ended export, so all exports count. Without one,
            those that have not ended count, and all of the file is checked for damage first.

    Raises:
        ServiceError: ``STATE_SCHEMA`` when it cannot be read.
    """
    unended = (exports.c.ended.is_(False),) if not running else ()
    documents = _documents(state, *unended, whole=not running)
    return None if documents is None else frozenset(_DIGEST.findall(json.dumps(documents)))


def _documents(state: Path, *conditions: sa.ColumnElement[bool], whole: bool = False) -> list[dict[str, Any]] | None:
    """Return the exports of :func:`read_exports` as plain data; None for a state without tables.

    Args:
        state: The file.
        conditions: On :data:`slipway_coordinator.storage.schema.exports`.
        whole: Check the whole file for damage first, not only the pages that the query reads.

    Raises:
        ServiceError: ``STATE_SCHEMA`` when it cannot be read.
    """
    try:
        check_database_files(state)
    except OSError as error:
        raise _unreadable(state, f"{Path(error.filename or state).name} is {error.strerror}", damaged=False) from error
    query = sa.select(exports.c.record).where(*conditions).order_by(exports.c.create_time.desc())
    url = sa.URL.create("sqlite", database=f"file:{quote(str(state))}", query={"mode": "ro", "uri": "true"})
    engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args={"timeout": _BUSY_SECONDS})
    try:
        with engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one() if whole else "ok"
            if found != "ok":
                raise _unreadable(state, str(found))
            documents = [json.loads(text) for text in connection.execute(query).scalars()]
    except sa.exc.DatabaseError as error:
        if "no such table" in str(error.orig):
            return None
        # Only errors of the base class itself concern the file's content; others, such as a locked file, may pass.
        raise _unreadable(state, str(error.orig), damaged=type(error) is sa.exc.DatabaseError) from error
    except ValueError as error:
        raise _unreadable(state, "an export in it is damaged") from error
    finally:
        engine.dispose()
    if not all(isinstance(document, dict) for document in documents):
        raise _unreadable(state, "an export in it is damaged")
    return documents


def _unreadable(state: Path, why: str, *, damaged: bool = True) -> ServiceError:
    again = f"remove {state.parent} and run its export again: the store still has its finished stages"
    return ServiceError(
        f"{state} cannot be read: {why}",
        reason="STATE_SCHEMA",
        remedy=again if damaged else "try again, and check that you may read it",
        about={"file": state},
    )
