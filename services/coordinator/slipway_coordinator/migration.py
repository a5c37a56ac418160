"""Bringing a state up to the tables this program needs: its own and those of the workflows. A job before a rollout."""

from __future__ import annotations

import logging

from dbos import DBOS

from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_address import State
from slipway_coordinator.storage.database_faults import faults_of

log = logging.getLogger("slipway.coordinator.migration")


def migrate(state: State) -> int:
    """Apply what is missing; answers how many of our own migrations that were. Harmless to repeat.

    Raises:
        ServiceError: ``COORDINATOR_UNAVAILABLE`` when the database does not answer, ``STATE_DENIED`` when it refuses,
            ``STATE_SCHEMA`` when its tables cannot be changed.
    """
    database = Database(state.url)
    try:
        with faults_of(state):
            if state.shared:
                database.ping()  # so that a database that is not there is said to be so, not retried for ever
                logging.getLogger("dbos").setLevel(logging.WARNING)
                DBOS.migrate(state.url)
            applied = database.migrate()
    finally:
        database.close()
    log.info(f"applied {applied} migrations to {state}")
    return applied
