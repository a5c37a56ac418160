"""The files of a SQLite database, checked before SQLite opens them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from slipway.files.regular_file import check_regular


def check_database_files(path: Path) -> None:
    """Refuse a SQLite file if SQLite would wait for it or follow it, or a file beside it, such as a pipe in place of its log.

    Raises:
        OSError: One of them is not a regular file. A missing file is not an error.
    """
    for name in (path.name, *(f"{path.name}-{part}" for part in ("wal", "shm", "journal"))):
        with contextlib.suppress(FileNotFoundError):
            check_regular(path.with_name(name))
