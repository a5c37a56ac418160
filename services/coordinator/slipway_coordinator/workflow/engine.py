"""The engine of the workflows: DBOS, launched, asked and ended. There is one in a process. All but :func:`start` block."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer, SetWorkflowID
from dbos import error as engine_errors

from slipway.errors import ServiceError
from slipway_coordinator.model.records import ExportRecord
from slipway_coordinator.storage.database import IDLE_SECONDS
from slipway_coordinator.storage.database_address import State
from slipway_coordinator.workflow import workflow

# Fixed, so that whichever process holds the lock goes on with all workflows.
EXECUTOR_ID = "coordinator"

WORKFLOW_VERSION = "slipway-3"
"""Changes when a workflow's steps change, so that stored ones could not be replayed: they are started anew (docs/adr/0017). So it
does when the same configuration gives another plan: the plan of an export whose sources are imported is made again in every replay.
"""

_LAST_WITHOUT_POSITION = "slipway-2"

# DBOS looks this often for messages between workflows. There are none here, but its end waits for the next look.
_LOOK_SECONDS = 0.05


def launch(state: State) -> None:
    """Begin, and go on with the workflows of this version that have not ended. The caller holds the state's lock.

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
    """Begin the workflow of a run from the export as it is; returns when that is stored."""
    with SetWorkflowID(record.workflow_id):
        await DBOS.start_workflow_async(workflow.export_workflow, record.to_json(), time.time())


@dataclass(frozen=True, slots=True)
class StoredWorkflow:
    """The workflow of a run as the engine has stored it.

    Attributes:
        version: Which version of workflows began it.
        state: The engine's word for where it is.
        first_revision: Revision of the export that it was started with.
    """

    version: str
    state: str
    first_revision: int

    @property
    def ended(self) -> bool:
        """Whether the engine does nothing more with it."""
        return self.state not in {"PENDING", "ENQUEUED"}

    @property
    def fits(self) -> bool:
        """Whether this program replays it."""
        return self.version == WORKFLOW_VERSION

    def events_read(self, record: ExportRecord) -> int:
        """Return the number of the last event that the stored export follows from."""
        if self.version != _LAST_WITHOUT_POSITION or "events_read" in record.model_fields_set:  # noted by a take-over
            return record.events_read
        # The first revision after the one it was started with is the beginning, and every event makes another.
        return max(record.revision - self.first_revision - 1, 0)


def stored(record: ExportRecord) -> StoredWorkflow | None:
    """Return the workflow of an export's run; None when it was not begun."""
    status = DBOS.get_workflow_status(record.workflow_id)
    if status is None:
        return None
    given = status.input["args"][0] if status.input is not None else {}
    return StoredWorkflow(status.app_version or "", status.status, int(given.get("revision", record.revision)))


def forget(record: ExportRecord) -> None:
    """Drop the workflows of all runs of an export."""
    for run in range(1, record.run + 1):
        DBOS.delete_workflow(f"{record.name}#{run}")


def forget_run(record: ExportRecord) -> None:
    """Drop the workflow of an export's run, which :func:`start` may then begin anew."""
    DBOS.delete_workflow(record.workflow_id)
