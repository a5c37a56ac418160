"""Find the artifacts that unfinished embedded exports of this machine use."""

from __future__ import annotations

import fcntl
from pathlib import Path

from slipway.contracts.coordinator import coordinator_service
from slipway.errors import ServiceError
from slipway.files.regular_file import open_regular
from slipway.settings import Settings


def digests_in_use(settings: Settings) -> frozenset[str]:
    """Return the artifacts named by exports that have not ended, or whose process is still running.

    A killed export will resume with its artifacts. Artifacts that a running export has not named yet are known to the store
    (:meth:`slipway.artifacts.store.ArtifactStore.under_way`).

    Raises:
        ServiceError: ``STATE_SCHEMA`` if a state cannot be read, because the artifacts of its export are unknown then.
        OSError: A folder cannot be read.
    """
    found: set[str] = set()
    for state in _states(settings.exports_path):
        lock = state.with_name("state.db.lock")
        try:
            named = coordinator_service().digests(state, is_locked(lock))
        except ServiceError as error:
            raise _unknown(state, error.message, error.remedy) from error
        if named is None and not is_locked(lock):
            remedy = f"remove {state.parent}: no export can resume from it"
            raise _unknown(state, f"{state} has no tables: it is damaged, or its process ended at its start", remedy)
        found |= named or frozenset()
    return frozenset(found)


def _states(folder: Path) -> list[Path]:
    """Return the state files of all exports; unlike ``glob``, fail for folders that cannot be read."""
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    return [entry / "state.db" for entry in entries if entry.is_dir() and _is_there(entry / "state.db")]


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _unknown(state: Path, why: str, remedy: str) -> ServiceError:
    return ServiceError(
        f"nothing was removed, because the artifacts of an export are unknown: {why}",
        reason="STATE_SCHEMA",
        remedy=remedy,
        about={"file": state},
    )


def is_locked(path: Path) -> bool:
    """Return whether a living process holds a lock.

    Raises:
        OSError: The lock file cannot be opened, or is not a regular file.
    """
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
