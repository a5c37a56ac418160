"""The lock that lets only one coordinator be active on a state: taken before anything else, held until the process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from slipway.errors import ServiceError
from slipway.files.regular_file import open_lock

_PATIENCE_SECONDS = 0.5
_PAUSE_SECONDS = 0.01


class StateLock(Protocol):
    """The right to be the active coordinator.

    Attributes:
        answers: Whether the lock's server responded last time.
        leader: The address that another holder announced; empty if it announced none.
        near_database: The address of this machine that the lock's server sees; empty if there is no server.
    """

    answers: bool
    leader: str
    near_database: str

    def announce(self, address: str) -> None:
        """Announce to standbys the address of the active coordinator. The caller holds the lock."""

    def acquire(self) -> bool:
        """Take the lock if it is free; return whether this process holds it. Blocks for some seconds at most."""

    def release(self) -> None:
        """Release the lock if this process holds it."""

    def refusal(self) -> ServiceError:
        """Return the error that says why :meth:`acquire` did not take the lock."""


class FileLock:
    """An exclusive lock beside a state file. The kernel releases it however the process ends.

    Args:
        state: The state file; the lock is ``{state}.lock``.
    """

    answers = True
    leader = near_database = ""

    def __init__(self, state: Path) -> None:
        self._path = state.with_name(state.name + ".lock")
        self._file: BinaryIO | None = None
        self._holder = ""

    def acquire(self) -> bool:
        """Take the lock if it is free; retry briefly, because a process that only tests the lock holds it for an instant."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = open_lock(self._path)  # not inheritable, so that no child process keeps the lock
        patience = time.monotonic() + _PATIENCE_SECONDS
        while not (ours := _try_lock(file.fileno())) and time.monotonic() < patience:
            time.sleep(_PAUSE_SECONDS)
        if not ours:
            self._holder = file.read(32).decode(errors="replace").strip()
            file.close()
            return False
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        self._file = file
        return True

    def announce(self, address: str) -> None:
        """Do nothing: a second coordinator on the same file ends instead of standing by."""

    def release(self) -> None:
        """Release the lock if this process holds it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def refusal(self) -> ServiceError:
        """Return the error that says why :meth:`acquire` did not take the lock."""
        return ServiceError(
            f"process {self._holder or 'unknown'} is active on {self._path.with_suffix('')}",
            reason="COORDINATOR_LOCKED",
            remedy="wait for it to end, or end it",
            about={"process": self._holder},
        )


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold_lock(lock: StateLock) -> Iterator[None]:
    """Hold a lock for the length of a block.

    Raises:
        ServiceError: reason ``COORDINATOR_LOCKED`` when another process holds it.
    """
    if not lock.acquire():
        raise lock.refusal()
    try:
        yield
    finally:
        lock.release()
