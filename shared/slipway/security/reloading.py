"""Values made from files, and made again when the files change; and descriptions of such files that show no secret.

A setting may hold a secret that was typed in place of its file's name, so errors do not repeat it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from slipway.errors import ModelExportError

log = logging.getLogger("slipway.security")

T = TypeVar("T")
Signature = tuple[tuple[int, int, int], ...]


class Reloaded(Generic[T]):
    """A value made from files, made again when one of them is replaced or written.

    If the new content is unusable, this is logged once and the last good value stays, because a certificate and its key are two
    files that are renewed one after the other. Safe for several threads.

    Args:
        paths: Files to watch; symbolic links are followed, because Kubernetes changes mounted secrets through them.
        load: Makes the value; raises :class:`ModelExportError` if it cannot.

    Raises:
        ModelExportError: The first load fails.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._signature = signature(self._paths)
        self._value = load()
        self.generation = 0

    def current(self) -> T:
        """Return the current value."""
        with self._lock:
            seen = signature(self._paths)
            if seen != self._signature:
                self._reload(seen)
            return self._value

    def _reload(self, seen: Signature) -> None:
        try:
            value = self._load()
        except ModelExportError as error:
            log.error(f"the files loaded before stay in use: {error}")
        else:
            if signature(self._paths) != seen:
                return  # written meanwhile: the next call reads again
            self._value = value
            self.generation += 1
            log.info(f"loaded again: {', '.join(str(path) for path in self._paths)}")
        self._signature = seen


def signature(paths: Sequence[Path]) -> Signature:
    """Return a value that changes when a file is replaced or written; a missing file is all zeros."""
    states = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            states.append((0, 0, 0))
        else:
            states.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(states)


def describe_path(path: Path, setting: str) -> str:
    """Return the path of a file, or a description of its setting if the path may be the secret.

    Args:
        path: The given path.
        setting: Its setting, such as ``token_file``.
    """
    if is_path(path):
        return str(path)
    flag = f"--{setting.replace('_', '-')}"
    return f"the value of {flag} or SLIPWAY_{setting.upper()} (not shown, because it may be the secret itself)"


def is_path(path: Path) -> bool:
    """Return whether this is a real path: it exists, or at least its first folder does."""
    start = path.parts[: 2 if path.is_absolute() else 1]
    # Methods of Path fail on a name as long as a key.
    return os.path.lexists(path) or (len(path.parts) > len(start) and os.path.isdir(Path(*start)))  # noqa: PTH112
