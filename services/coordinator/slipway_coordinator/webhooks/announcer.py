"""Tell receivers of changes: which change is an event, and the deliveries of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from slipway.observability import metrics
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.storage.deliveries import Delivery
from slipway_coordinator.webhooks.cloud_events import EventType, event_body, event_id
from slipway_coordinator.webhooks.receivers import Webhooks

log = logging.getLogger("slipway.coordinator.webhooks")

_TYPES: Mapping[ExportState, EventType] = {
    ExportState.QUEUED: EventType.RETRIED,
    ExportState.RUNNING: EventType.STARTED,
    ExportState.CANCELLING: EventType.CANCELLING,
    ExportState.SUCCEEDED: EventType.SUCCEEDED,
    ExportState.FAILED: EventType.FAILED,
    ExportState.CANCELLED: EventType.CANCELLED,
}
"""Events of an existing export by its new state."""


class WebhookAnnouncer:
    """Makes the deliveries of changes: one for each receiver that is told of them.

    Args:
        webhooks: Returns the receivers of this moment. Safe from any thread.
    """

    def __init__(self, webhooks: Callable[[], Webhooks]) -> None:
        self._webhooks = webhooks

    def tell_change(self, before: ExportState | None, after: ExportRecord) -> Sequence[Delivery]:
        """As :meth:`slipway_coordinator.storage.deliveries.Announcer.tell_change`."""
        if before is None:
            return self._deliveries(EventType.CREATED, after, at=after.create_time, revision=after.revision)
        if before is after.state:
            return ()
        kind = _TYPES[after.state]
        at = after.begin_time if kind is EventType.STARTED else after.end_time
        return self._deliveries(kind, after, at=at, revision=after.revision)

    def tell_deletion(self, record: ExportRecord) -> Sequence[Delivery]:
        """As :meth:`slipway_coordinator.storage.deliveries.Announcer.tell_deletion`."""
        return self._deliveries(EventType.DELETED, record, at=None, revision=record.revision + 1)

    def _deliveries(
        self, kind: EventType, record: ExportRecord, *, at: float | None, revision: int
    ) -> Sequence[Delivery]:
        webhooks = self._webhooks()
        told = [receiver for receiver in webhooks.receivers if receiver.entry.is_told(kind, record.project)]
        if not told:
            return ()
        at = time.time() if at is None else at
        try:
            identity = event_id(kind, record)
            body = event_body(kind, record, identity=identity, source=webhooks.source, at=at)
        except Exception:  # the export goes on without it
            log.exception(f"no event can be made for a change of {record.name}")
            for receiver in told:
                metrics.WEBHOOK_LOST.add(receiver=receiver.name)
            return ()
        return [
            Delivery(
                receiver=receiver.name,
                id=identity,
                type=kind.value,
                export=record.name,
                export_create_time=record.create_time,
                revision=revision,
                body=body,
            )
            for receiver in told
        ]
