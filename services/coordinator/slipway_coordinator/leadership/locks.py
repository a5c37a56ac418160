"""Choose the lock of a state."""

from __future__ import annotations

from slipway_coordinator.leadership.advisory_lock import AdvisoryLock
from slipway_coordinator.leadership.file_lock import FileLock, StateLock
from slipway_coordinator.storage.database_address import PostgresState, State


def lock_of(state: State) -> StateLock:
    """Return the lock that makes its holder the only active coordinator of a state."""
    return AdvisoryLock(state.address) if isinstance(state, PostgresState) else FileLock(state.path)
