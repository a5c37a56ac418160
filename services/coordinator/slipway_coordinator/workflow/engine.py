"""Launch, query and end DBOS, the workflow engine. A process has one. All functions but :func:`start` block."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer, SetWorkflowID, _dbos
from dbos import error as engine_errors

from slipway.errors import ServiceError
from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_coordinator.storage.database import IDLE_SECONDS
from slipway_coordinator.storage.database_access import State
from slipway_coordinator.workflow import workflow

WORKFLOW_VERSION = "slipway-6"
"""Raise this when a workflow's steps change: stored workflows of another version are started again from the record, not replayed (docs/adr/0017)."""

_LAST_WITHOUT_POSITION = "slipway-2"

# Interval at which DBOS polls for messages between workflows. There are none, but its shutdown waits for the next poll.
_LOOK_SECONDS = 0.05

_log_before: list[tuple[int, list[logging.Handler]]] = []
"""Level and handlers of the engine's log before :func:`launch`, for :func:`end`; empty while no engine of ours runs."""


def launch(state: State, executor: str) -> None:
    """Launch the engine. The caller holds the state's lock, and resumes the unended workflows with :func:`resume`.

    Args:
        state: Where the workflows are stored.
        executor: Id of this start alone. The engine would resume all workflows of its executor at once, before the coordinator
            answers a call.

    Raises:
        ServiceError: reason ``STATE_SCHEMA`` if the engine's tables have another version or cannot be read; ``COORDINATOR_LOCKED``
            if the program that calls Slipway runs an engine itself.
    """
    if _dbos._dbos_global_instance is not None:  # DBOS() would return it as it is, and tells nobody
        raise ServiceError(
            "this program uses DBOS itself, and a process has one workflow engine",
            reason="COORDINATOR_LOCKED",
            remedy="export in another process, or name a coordinator",
        )
    engine_log = logging.getLogger("dbos")
    _log_before.append((engine_log.level, list(engine_log.handlers)))
    engine_log.setLevel(logging.CRITICAL)
    if not engine_log.handlers:
        # Otherwise it keeps the standard error of its first start, which a program may replace and close.
        engine_log.addHandler(logging.NullHandler())
    config = DBOSConfig(
        name="slipway",
        system_database_url=state.url,
        run_migrations=not state.shared,
        executor_id=executor,
        application_version=WORKFLOW_VERSION,
        serializer=DBOSPortableJSONSerializer(),
        sys_db_idle_transaction_timeout_sec=IDLE_SECONDS,
        log_level="CRITICAL",  # DBOS prints to stderr by itself; failures that matter reach the export's record
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
    """Wait for the engine's threads and end the engine; do nothing if :func:`launch` started none."""
    if not _log_before:
        return
    DBOS.destroy()
    engine_log = logging.getLogger("dbos")
    level, engine_log.handlers[:] = _log_before.pop()
    engine_log.setLevel(level)


async def start(record: ExportRecord) -> None:
    """Start the workflow of a run with this record; return when the start is stored."""
    with SetWorkflowID(record.workflow_id):
        await DBOS.start_workflow_async(workflow.export_workflow, record.model_dump_json())


@dataclass(frozen=True, slots=True)
class StoredWorkflow:
    """The workflow of a run as stored by the engine.

    Attributes:
        version: Workflow version that began it.
        state: Its state, in the engine's words.
        first_revision: Revision of the export that it was started with.
        executor: Id of the executor that ran it last.
    """

    version: str
    state: str
    first_revision: int
    executor: str = ""

    @property
    def ended(self) -> bool:
        """Whether the engine has finished with it."""
        return self.state not in {"PENDING", "ENQUEUED"}

    def is_orphaned(self, executor: str) -> bool:
        """Return whether an earlier executor ran it and nobody runs it now. The engine itself takes up a workflow that is queued again."""
        return self.state == "PENDING" and self.executor != executor

    @property
    def can_replay(self) -> bool:
        """Whether this program can replay it."""
        return self.version == WORKFLOW_VERSION

    def events_read(self, record: ExportRecord) -> int:
        """Return the number of the last event that the stored export includes."""
        if self.version != _LAST_WITHOUT_POSITION or "events_read" in record.model_fields_set:  # noted by a take-over
            return record.events_read
        # The begin of the run made the first revision after first_revision, and every event made another.
        return max(record.revision - self.first_revision - 1, 0)


def stored_workflow(record: ExportRecord) -> StoredWorkflow | None:
    """Return the workflow of an export's run; None if it was not begun."""
    status = DBOS.get_workflow_status(record.workflow_id)
    if status is None:
        return None
    given = status.input["args"][0] if status.input is not None else {}
    if isinstance(given, str):  # workflows of earlier versions were given an object
        given = json.loads(given)
    first = int(given.get("revision", record.revision))
    return StoredWorkflow(status.app_version or "", status.status, first, executor=status.executor_id or "")


def resume(record: ExportRecord) -> None:
    """Let the engine replay the workflow of an export's run, which nobody runs now."""
    DBOS.resume_workflow(record.workflow_id)


def forget(record: ExportRecord) -> None:
    """Delete the workflows of all runs of an export."""
    for run in range(1, record.run + 1):
        DBOS.delete_workflow(f"{record.name}#{run}")


def forget_run(record: ExportRecord) -> None:
    """Delete the workflow of an export's run; :func:`start` may then start it again."""
    DBOS.delete_workflow(record.workflow_id)
