"""Bringing a state up to the tables this program needs: its own and those of the workflows. A job before a rollout."""

from __future__ import annotations

import logging

import sqlalchemy as sa
from dbos import DBOS

from slipway.errors import ServiceError
from slipway_coordinator.database import Database
from slipway_coordinator.journal import answering
from slipway_coordinator.state import State

log = logging.getLogger("slipway.coordinator.migration")


def migrate(state: State) -> int:
    """Apply what is missing; answers how many of our own migrations that were. Harmless to repeat.

    Raises:
        ServiceError: ``COORDINATOR_UNAVAILABLE`` when the database does not answer, ``STATE_SCHEMA`` when it refuses.
    """
    database = Database(state.url)
    try:
        if state.shared:
            answering(database.ping)  # so that a database that is not there is said to be so, not retried for ever
            logging.getLogger("dbos").setLevel(logging.WARNING)
            DBOS.migrate(state.url)
        applied = answering(database.migrate)
    except sa.exc.SQLAlchemyError as error:
        raise ServiceError(
            f"the tables of {state} cannot be changed: {error}",
            reason="STATE_SCHEMA",
            remedy="use a role that owns the database for this command",
        ) from error
    finally:
        database.close()
    log.info(f"applied {applied} migrations to {state}")
    return applied
