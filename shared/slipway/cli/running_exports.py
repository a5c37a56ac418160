"""Which artifacts the unfinished exports of this machine use."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

from slipway.artifacts import ArtifactStore
from slipway.errors import ServiceError
from slipway.settings import Settings
from slipway_coordinator.reading import read_documents
from slipway_coordinator.schema import exports

GRACE_SECONDS = 3600.0
"""While an export runs, artifacts used so recently are kept: it may be about to name them."""


def digests_in_use(settings: Settings, store: ArtifactStore, *, now: float) -> frozenset[str]:
    """Artifacts that a collection must leave alone.

    Those of exports that have not ended (a killed one goes on with them), and while any export runs, recent ones too.
    """
    found: set[str] = set()
    running = False
    for state in sorted(settings.exports_path.glob("*/state.db")):
        running = running or is_locked(state.with_name("state.db.lock"))
        for record in _unfinished(state):
            found |= set(record.get("sources", {}).values())
            for task in record.get("tasks", []):
                found |= set(task.get("outputs", {}).values())
    if running:
        found |= {digest for digest in store.digests() if now - store.last_used(digest) < GRACE_SECONDS}
    return frozenset(found)


def _unfinished(state: Path) -> list[dict[str, Any]]:
    """Exports in a state that have not ended; none in one that cannot be read, because nothing goes on with it."""
    try:
        return read_documents(state, exports.c.ended.is_(False))
    except ServiceError:
        return []


def is_locked(path: Path) -> bool:
    """Whether a living process holds a lock.

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
