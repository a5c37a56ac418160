"""Values read from files, and read again when the files change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from slipway.errors import ModelExportError

log = logging.getLogger("slipway.security")

T = TypeVar("T")
Signature = tuple[tuple[int, int, int], ...]


class Reloaded(Generic[T]):
    """A value made from files, made anew when one of them was replaced or written.

    New content that cannot be used is logged once, and the last good value stays: a certificate and its key are two files,
    and whoever renews them writes one first. Safe for several threads.

    Args:
        paths: Files to look at; symbolic links are followed, as Kubernetes changes mounted secrets through them.
        load: Makes the value; raises :class:`ModelExportError` when it cannot.

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
        """Return the value as of now."""
        with self._lock:
            seen = signature(self._paths)
            if seen != self._signature:
                self._reload(seen)
            return self._value

    def _reload(self, seen: Signature) -> None:
        try:
            value = self._load()
        except ModelExportError as error:
            log.error(f"what was loaded before stays in use: {error}")
        else:
            if signature(self._paths) != seen:
                return  # written meanwhile: the next call reads again
            self._value = value
            self.generation += 1
            log.info(f"loaded again: {', '.join(str(path) for path in self._paths)}")
        self._signature = seen


def signature(paths: Sequence[Path]) -> Signature:
    """Return what changes when a file is replaced or written; a missing file is all zeros."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)
