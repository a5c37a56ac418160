"""Report a full file system with the same error everywhere."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from slipway.errors import ModelExportError

REMEDY = "free space there, or work on another disk"


def is_disk_full(error: BaseException) -> bool:
    """Return whether the operating system refused to write for lack of space or quota."""
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def translate_disk_full(kind: type[ModelExportError], doing: str, *, at: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Translate the operating system's "no space left" into the error that users and recovery rules know.

    Args:
        kind: Class of the error.
        doing: Purpose of the space, such as ``for the merged model``.
        at: Folder that was written to.
        remedy: Remedy of the error.

    Raises:
        ModelExportError: Of the class ``kind``, reason ``DISK_FULL``.
    """
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise kind(f"no space left at {at} {doing}", reason="DISK_FULL", remedy=remedy, about={"folder": at}) from error
