"""``slipway coordinator migrate``: bring a state's tables, its own and the workflow engine's, up to date before a rollout."""

from __future__ import annotations

import logging

from dbos import DBOS

from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_address import State
from slipway_coordinator.storage.database_faults import translate_startup_errors

log = logging.getLogger("slipway.coordinator.migration")


def migrate(state: State) -> int:
    """Apply the missing migrations; return how many of our own there were. Harmless to repeat.

    Raises:
        ServiceError: ``COORDINATOR_UNAVAILABLE`` if the database is unavailable, ``STATE_DENIED`` if it refuses access,
            ``STATE_SCHEMA`` if its tables cannot be changed.
    """
    database = Database(state.url)
    try:
        with translate_startup_errors(state):
            if state.shared:
                database.ping()  # fails at once for a missing database, which DBOS would retry for ever
                logging.getLogger("dbos").setLevel(logging.WARNING)
                DBOS.migrate(state.url)
            applied = database.migrate()
    finally:
        database.close()
    log.info(f"applied {applied} migrations to {state}")
    return applied
