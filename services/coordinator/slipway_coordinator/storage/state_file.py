"""Check a state's SQLite file before SQLite opens it, and read its exports while it may be in use.

Reading takes no lock and changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pydantic

from slipway.errors import ServiceError
from slipway.files.regular_file import check_regular
from slipway_coordinator.lifecycle.records import ExportRecord

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BUSY_SECONDS = 5


class _Query(NamedTuple):
    text: str
    values: Sequence[Any] = ()


_ALL = _Query("SELECT record FROM slipway_exports ORDER BY create_time DESC")
_UNENDED = _Query("SELECT record FROM slipway_exports WHERE NOT ended ORDER BY create_time DESC")


def read_exports(state: Path, *, filter: str = "") -> list[ExportRecord]:  # noqa: A002 - the field's name everywhere
    """Return the exports in a SQLite state, newest first; none if it has no tables yet.

    Args:
        state: The file.
        filter: As for a list at a coordinator; empty matches all.

    Raises:
        ServiceError: ``STATE_SCHEMA`` when it cannot be read; ``REQUEST_INVALID`` for a filter that is not understood.
    """
    documents = _documents(state, _filter_query(filter) if filter else _ALL) or []
    try:
        return [ExportRecord.from_json(document) for document in documents]
    except pydantic.ValidationError as error:
        raise _unreadable_error(state, "an export in it was written by another version of Slipway") from error


def find_digests(state: Path, *, running: bool) -> frozenset[str] | None:
    """Return every digest that the exports in use contain, whichever version of Slipway wrote them; None for a state without tables.

    Args:
        state: The file.
        running: Whether a process has it open. That process may be delivering an ended export, so all exports count. Without one,
            those that have not ended count, and all of the file is checked for damage first.

    Raises:
        ServiceError: ``STATE_SCHEMA`` when it cannot be read.
    """
    documents = _documents(state, _ALL if running else _UNENDED, whole=not running)
    return None if documents is None else frozenset(_DIGEST.findall(json.dumps(documents)))


def _filter_query(filter: str) -> _Query:  # noqa: A002 - the field's name everywhere
    """Return the query of the exports that match a filter. SQLAlchemy is imported only here: that takes longer than the reading."""
    import sqlalchemy as sa
    from sqlalchemy.dialects import sqlite

    from slipway_coordinator.storage.filters import parse_filter
    from slipway_coordinator.storage.schema import exports

    query = sa.select(exports.c.record).where(*parse_filter(filter)).order_by(exports.c.create_time.desc())
    compiled = query.compile(dialect=sqlite.dialect())
    return _Query(str(compiled), [compiled.params[name] for name in compiled.positiontup or ()])


def _documents(state: Path, query: _Query, *, whole: bool = False) -> list[dict[str, Any]] | None:
    """Return the exports of :func:`read_exports` as plain data; None for a state without tables.

    Args:
        state: The file.
        query: Query of their records.
        whole: Check the whole file for damage first, not only the pages that the query reads.

    Raises:
        ServiceError: ``STATE_SCHEMA`` when it cannot be read.
    """
    try:
        check_database_files(state)
    except OSError as error:
        raise _unreadable_error(
            state, f"{Path(error.filename or state).name} is {error.strerror}", damaged=False
        ) from error
    address = f"file:{quote(str(state))}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS)) as connection:
            fault = connection.execute("PRAGMA integrity_check(1)").fetchone()[0] if whole else "ok"
            if fault != "ok":
                raise _unreadable_error(state, str(fault))
            documents = [json.loads(text) for (text,) in connection.execute(query.text, query.values)]
    except sqlite3.DatabaseError as error:
        if "no such table" in str(error):
            return None
        # Only errors of the base class itself concern the file's content; others, such as a locked file, may pass.
        raise _unreadable_error(state, str(error), damaged=type(error) is sqlite3.DatabaseError) from error
    except (TypeError, ValueError) as error:
        raise _unreadable_error(state, "an export in it is damaged") from error
    if not all(isinstance(document, dict) for document in documents):
        raise _unreadable_error(state, "an export in it is damaged")
    return documents


def _unreadable_error(state: Path, why: str, *, damaged: bool = True) -> ServiceError:
    again = f"remove {state.parent} and run its export again: the store still has its finished stages"
    return ServiceError(
        f"{state} cannot be read: {why}",
        reason="STATE_SCHEMA",
        remedy=again if damaged else "try again, and check that you may read it",
        about={"file": state},
    )


def check_database_files(path: Path) -> None:
    """Refuse a SQLite file if SQLite would wait for it or follow it, or a file beside it, such as a pipe in place of its log.

    Raises:
        OSError: One of them is not a regular file. A missing file is not an error.
    """
    for name in (path.name, *(f"{path.name}-{part}" for part in ("wal", "shm", "journal"))):
        with contextlib.suppress(FileNotFoundError):
            check_regular(path.with_name(name))
