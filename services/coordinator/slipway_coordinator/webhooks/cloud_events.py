"""The events of exports as CloudEvents (1.0, JSON)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from google.protobuf.json_format import MessageToDict

from slipway_coordinator.api.messages import export_summary
from slipway_coordinator.lifecycle.records import ExportRecord

TYPE_PREFIX = "dev.slipway."
MOST_BYTES = 64 << 10
"""Largest body; CloudEvents lets programs between sender and receiver refuse larger ones."""
_MOST_ERROR = 8000  # characters
_LEFT_OUT = ("warnings", "labels", "outputs")


class EventType(StrEnum):
    """Type of an event, without :data:`TYPE_PREFIX`."""

    CREATED = "export.created"
    STARTED = "export.started"
    CANCELLING = "export.cancelling"
    SUCCEEDED = "export.succeeded"
    FAILED = "export.failed"
    CANCELLED = "export.cancelled"
    RETRIED = "export.retried"
    DELETED = "export.deleted"


def event_id(kind: EventType, record: ExportRecord) -> str:
    """Return the id of an event, which follows from the change: in a run of an export, each event happens once."""
    change = json.dumps([record.name, record.create_time, record.run, kind.value])
    return hashlib.sha256(change.encode()).hexdigest()[:32]


def event_body(kind: EventType, record: ExportRecord, *, identity: str, source: str, at: float) -> str:
    """Return an event as a CloudEvent in JSON, with at most :data:`MOST_BYTES`.

    Args:
        kind: Its type.
        record: The export at that moment.
        identity: Its id.
        source: Where it happened, as a URI.
        at: When it happened, in seconds since the epoch.
    """
    event = {
        "specversion": "1.0",
        "id": identity,
        "source": source,
        "type": f"{TYPE_PREFIX}{kind.value}",
        "subject": record.name,
        "time": datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z"),
        "datacontenttype": "application/json",
    }
    for data in _smaller_and_smaller(record):
        body = json.dumps(event | {"data": data}, ensure_ascii=False, separators=(",", ":"))
        if len(body.encode()) <= MOST_BYTES:
            return body
    raise ValueError(f"the event {kind.value} of {record.name} has more than {MOST_BYTES} bytes")


def _smaller_and_smaller(record: ExportRecord) -> Iterator[dict[str, Any]]:
    """Yield the export as the API's summaries have it, then with less of what has no limit of its own."""
    message = export_summary(record)
    yield MessageToDict(message)
    for name in _LEFT_OUT:
        message.ClearField(name)
        yield MessageToDict(message)
    message.error.ClearField("details")
    message.error.message = message.error.message[:_MOST_ERROR]
    yield MessageToDict(message)
