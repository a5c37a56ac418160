"""An operator that exports a fine-tuned model at a Slipway coordinator: copy it and slipway_http.py into your DAGs' folder.

The connection ``slipway_default`` is of type HTTP: host, port, schema (https), a submitter's token as the password, and as extra
``{"project": "research", "ca_file": "/etc/slipway/ca.crt", "patience_seconds": 300}``, of which nothing is required. A task that is ended
cancels its export; one that is tried again continues it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from airflow.sdk import BaseHook, BaseOperator, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from slipway_http import Slipway, SlipwayError, request_id


class SlipwayExportOperator(BaseOperator):
    """Export a model and wait for it; the result is the outputs by format: digest, verdict, KL divergence and size of each.

    Args:
        configuration: Settings of the export, as ``ExportConfiguration`` of the coordinator's ``/openapi.json``; templated.
        conn_id: The connection.
    """

    template_fields: Sequence[str] = ("configuration",)

    def __init__(
        self,
        *,
        configuration: Mapping[str, Any],
        conn_id: str = "slipway_default",
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.configuration = configuration
        self.conn_id = conn_id
        self._running: tuple[Slipway, str] | None = None

    def execute(self, context: Context) -> dict[str, dict[str, Any]]:
        """Make the export of this run of the DAG."""
        task = context["ti"]
        known = request_id("airflow", task.dag_id, task.run_id, task.task_id, task.map_index)
        slipway = self._coordinator()
        try:
            name = slipway.submit(self.configuration, request_id=known)
            self._running = slipway, name
            self.log.info("waiting for %s", name)
            return {kind: asdict(output) for kind, output in slipway.wait(name).items()}
        except SlipwayError as error:
            # A failure that another try does not change ends the task, whatever its retries.
            raise (AirflowException if error.retryable else AirflowFailException)(str(error)) from error

    def on_kill(self) -> None:
        """Cancel the export when the task is ended: by somebody, or by its execution_timeout."""
        if self._running is not None:
            slipway, name = self._running
            slipway.cancel(name)

    def _coordinator(self) -> Slipway:
        found = BaseHook.get_connection(self.conn_id)
        more = found.extra_dejson
        return Slipway(
            f"{found.schema or 'http'}://{found.host}:{found.port or 7080}",
            project=more.get("project", "default"),
            token=found.password or "",
            ca_file=more.get("ca_file", ""),
            patience_seconds=float(more.get("patience_seconds", 300)),
            tell=self.log.info,
        )
