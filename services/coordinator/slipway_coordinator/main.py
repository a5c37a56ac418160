"""The coordinator's process: ``slipway coordinator``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os

from dbos import DBOS

from slipway.artifacts.opening import open_store
from slipway.observability.metrics import serving
from slipway.observability.telemetry import tracing
from slipway.security.flags import given
from slipway.security.server import coordinator_security
from slipway.service_flags import run_service
from slipway.settings import Settings
from slipway.settings.security import Security
from slipway.sources.allowed import Allowed
from slipway_coordinator.coordinator import CoordinatorOptions
from slipway_coordinator.model.rules import DEFAULT_RULES, load_rules
from slipway_coordinator.server import serve
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_address import State, state_at
from slipway_coordinator.storage.database_faults import translate_startup_errors
from slipway_coordinator.transfers import TransferLimits

log = logging.getLogger("slipway.coordinator")


def main(arguments: argparse.Namespace) -> int:
    """Run a coordinator; return 0 or the exit code of the error that ended it."""
    return run_service(arguments, _run)


def _run(arguments: argparse.Namespace) -> None:
    state = state_at(arguments.state)
    if arguments.command == "migrate":
        migrate(state)
        return
    settings = Settings.from_environment(os.environ)
    options = CoordinatorOptions(
        state=state,
        lease_seconds=arguments.lease_seconds,
        max_unended=arguments.max_exports,
        upload_bytes=settings.upload_bytes,
        open_uploads=settings.open_uploads,
        import_from=Allowed.parse(settings.import_from),
        transfers=TransferLimits(bytes_per_second=settings.transfer_rate),
        retain_days=arguments.retain_days,
        rules=load_rules(arguments.recovery_rules or DEFAULT_RULES),
    )
    security = coordinator_security(
        given(arguments, Security.from_environment(os.environ)),
        address=arguments.listen,
        health_address=arguments.health_listen,
        token_address=arguments.token_listen,
        allow_anonymous=arguments.allow_anonymous,
    )
    with tracing(settings, service="slipway-coordinator"), serving(arguments.metrics) as port:
        if port:
            log.info(f"metrics on port {port}")
        # Queued exports hold many long-lived objects; frequent garbage collection over them would pause every call.
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)
        asyncio.run(
            serve(
                options,
                address=arguments.listen,
                store=lambda: open_store(settings),
                security=security,
                advertise=arguments.advertise,
            )
        )


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
