"""Which artifacts the unfinished exports of this machine use."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path

from slipway.errors import ServiceError
from slipway.settings import Settings
from slipway_coordinator.storage.reading import read_documents
from slipway_coordinator.storage.schema import exports

_DIGESTS = re.compile(r"sha256:[0-9a-f]{64}")


def digests_in_use(settings: Settings) -> frozenset[str]:
    """Artifacts that the states of exports name which have not ended, or are delivered by a living process just now.

    A killed export goes on with what it has. What a living one is about to name is the store's to know
    (:meth:`slipway.artifacts.store.ArtifactStore.under_way`).

    Raises:
        ServiceError: ``STATE_SCHEMA`` when a state cannot be read, as nobody knows then what its export uses.
        OSError: A folder cannot be read.
    """
    found: set[str] = set()
    for state in _states(settings.exports_path):
        lock = state.with_name("state.db.lock")
        running = is_locked(lock)
        unended = () if running else (exports.c.ended.is_(False),)
        try:
            documents = read_documents(state, *unended, whole=not running)
        except ServiceError as error:
            raise _unknown(state, error.message, error.remedy) from error
        if documents is None and not is_locked(lock):
            remedy = f"remove {state.parent}: no export can go on with it"
            raise _unknown(state, f"{state} holds no tables: it is damaged, or its export ended as it began", remedy)
        found.update(_DIGESTS.findall(json.dumps(documents)))
    return frozenset(found)


def _states(folder: Path) -> list[Path]:
    """State files of all exports; unlike ``glob`` this does not leave out what is in folders that cannot be read."""
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
        f"nothing was removed, as what an export uses is not known: {why}",
        reason="STATE_SCHEMA",
        remedy=remedy,
        about={"file": state},
    )


def is_locked(path: Path) -> bool:
    """Return whether a living process holds a lock.

    Raises:
        OSError: It cannot be opened, so that nobody knows.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
