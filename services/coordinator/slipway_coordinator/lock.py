"""Only one coordinator is active on a state: a lock taken before anything else, held until the process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from slipway.errors import ServiceError


class StateLock:
    """An exclusive lock beside a state file. The kernel gives it back when the process ends, however it ends.

    Args:
        state: The state file; the lock is ``{state}.lock``.

    Raises:
        ServiceError: reason ``COORDINATOR_LOCKED`` on entering, when another process holds it.
    """

    def __init__(self, state: Path) -> None:
        self._path = state.with_name(state.name + ".lock")
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Not inheritable, so that no child process keeps the lock.
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise ServiceError(
                f"process {holder or 'unknown'} is active on {self._path.with_suffix('')}",
                reason="COORDINATOR_LOCKED",
                remedy="wait for it to end, or end it",
                about={"process": holder},
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
