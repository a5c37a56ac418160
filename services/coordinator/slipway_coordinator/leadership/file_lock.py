"""Only one coordinator is active on a state: a lock taken before anything else, held until the process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from slipway.errors import ServiceError

_PATIENCE_SECONDS = 0.5
_PAUSE_SECONDS = 0.01


class StateLock(Protocol):
    """The right to be the active coordinator.

    Attributes:
        answers: Whether the place that the lock is in answered last time.
        leader: The address that its holder announced, when it was not ours; empty where it did not.
        near_database: The address of this machine that the lock's server sees; empty where there is no server.
    """

    answers: bool
    leader: str
    near_database: str

    def announce(self, address: str) -> None:
        """Let those who wait know where the active coordinator is reached. The caller holds the lock."""

    def acquire(self) -> bool:
        """Take it if nobody has it; whether it is ours now. Blocks for some seconds at most."""

    def release(self) -> None:
        """Give it back, if it is ours."""

    def refusal(self) -> ServiceError:
        """Why :meth:`acquire` did not take it."""


class FileLock:
    """An exclusive lock beside a state file. The kernel gives it back when the process ends, however it ends.

    Args:
        state: The state file; the lock is ``{state}.lock``.
    """

    answers = True
    leader = near_database = ""

    def __init__(self, state: Path) -> None:
        self._path = state.with_name(state.name + ".lock")
        self._descriptor = -1
        self._holder = ""

    def acquire(self) -> bool:
        """Take it if nobody has it; whether it is ours now. Who looks whether it is taken has it for an instant."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Not inheritable, so that no child process keeps the lock.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        patience = time.monotonic() + _PATIENCE_SECONDS
        while not (ours := _taken(descriptor)) and time.monotonic() < patience:
            time.sleep(_PAUSE_SECONDS)
        if not ours:
            self._holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            return False
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return True

    def announce(self, address: str) -> None:
        """Nobody waits for it: a second coordinator on a file ends."""

    def release(self) -> None:
        """Give it back, if it is ours."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def refusal(self) -> ServiceError:
        """Why :meth:`acquire` did not take it."""
        return ServiceError(
            f"process {self._holder or 'unknown'} is active on {self._path.with_suffix('')}",
            reason="COORDINATOR_LOCKED",
            remedy="wait for it to end, or end it",
            about={"process": self._holder},
        )


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def holding(lock: StateLock) -> Iterator[None]:
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
