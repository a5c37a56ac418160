"""The engine of the workflows: DBOS, launched, asked and ended. There is one in a process. All but :func:`start` block."""

from __future__ import annotations

import logging
import time

from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer, SetWorkflowID
from dbos import error as engine_errors

from slipway.errors import ServiceError
from slipway_coordinator import workflow
from slipway_coordinator.database import IDLE_SECONDS
from slipway_coordinator.records import ExportRecord
from slipway_coordinator.state import State

# Fixed, so that whichever process holds the lock goes on with all workflows. The version changes only when a workflow's
# steps change order, and stored workflows could not be replayed any more.
EXECUTOR_ID = "coordinator"
WORKFLOW_VERSION = "slipway-2"

# DBOS looks this often for messages between workflows. There are none here, but its end waits for the next look.
_LOOK_SECONDS = 0.05


def launch(state: State) -> None:
    """Begin, and go on with the workflows that have not ended. The caller holds the state's lock.

    Raises:
        ServiceError: reason ``STATE_SCHEMA`` when the engine's tables are those of another version, or it may not see them.
    """
    logging.getLogger("dbos").setLevel(logging.CRITICAL)
    config = DBOSConfig(
        name="slipway",
        system_database_url=state.url,
        run_migrations=not state.shared,
        executor_id=EXECUTOR_ID,
        application_version=WORKFLOW_VERSION,
        serializer=DBOSPortableJSONSerializer(),
        sys_db_idle_transaction_timeout_sec=IDLE_SECONDS,
        log_level="CRITICAL",  # what matters reaches the export's record; DBOS prints to stderr by itself
        enable_otlp=False,
        notification_listener_polling_interval_sec=_LOOK_SECONDS,
    )
    DBOS(config=config)
    try:
        DBOS.launch()
    except engine_errors.DBOSInitializationError as error:
        raise ServiceError(
            "the workflow engine's tables, in the schema dbos, are not those this program needs",
            reason="STATE_SCHEMA",
            remedy="run slipway coordinator migrate --state …, and let the coordinator's role use that schema",
        ) from error


def end() -> None:
    """Wait for the engine's threads, and end it."""
    DBOS.destroy()


async def start(record: ExportRecord) -> None:
    """Begin the workflow of a run; returns when that is stored."""
    with SetWorkflowID(record.workflow_id):
        await DBOS.start_workflow_async(workflow.export_workflow, record.to_json(), time.time())


def began(record: ExportRecord) -> tuple[bool, str]:
    """Whether the workflow of a run was begun, and what keeps it from going on, if anything does."""
    status = DBOS.get_workflow_status(record.workflow_id)
    if status is None:
        return False, ""
    if status.status not in {"PENDING", "ENQUEUED"}:
        return True, f"ended as {status.status}"
    if status.app_version != WORKFLOW_VERSION:
        return True, f"was begun by another version, {status.app_version}"
    return True, ""


def forget(record: ExportRecord) -> None:
    """Drop the workflows of all runs of an export."""
    for run in range(1, record.run + 1):
        DBOS.delete_workflow(f"{record.name}#{run}")
