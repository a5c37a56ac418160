"""Names and requests, the same for both clients, and the state of a watch that is resumed after disconnects."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from slipway.configuration import ExportConfiguration
from slipway.errors import Failure
from slipway.observability.telemetry import current_traceparent
from slipway.reasons import REASONS, Category
from slipway.rpc.configuration_messages import asked_configuration_message
from slipway.rpc.state_names import ENDED
from slipway.rpc.structs import sendable
from slipway_protos.v1 import export_pb2 as pb

DEFAULT_PROJECT = "default"
TIMEOUT_SECONDS = 30.0

Metadata = tuple[tuple[str, str], ...]

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


def export_name(export: str, *, project: str = DEFAULT_PROJECT) -> str:
    """Return the full name ``projects/{project}/exports/{export}`` of an export given by id; a full name stays as it is."""
    return sendable(export if export.startswith("projects/") else f"projects/{project}/exports/{export}")


def artifact_name(digest: str, *, project: str) -> str:
    """Return the full name of a project's artifact."""
    return sendable(f"projects/{project}/artifacts/{digest}")


def create_request(
    configuration: ExportConfiguration,
    *,
    sources: Mapping[str, str],
    labels: Mapping[str, str] | None,
    export_id: str,
    project: str,
    validate_only: bool,
    request_id: str,
    priority: int,
    source_formats: Mapping[str, str] | None,
) -> pb.CreateExportRequest:
    """Return the request of ``create_export``."""
    return pb.CreateExportRequest(
        parent=sendable(f"projects/{project}"),
        export_id=sendable(export_id),
        configuration=asked_configuration_message(configuration),
        sources=_texts(sources),
        labels=_texts(labels or {}),
        validate_only=validate_only,
        request_id=sendable(request_id),
        priority=priority,
        source_formats=_texts(source_formats or {}),
    )


def list_request(
    project: str,
    *,
    page_size: int,
    filter: str,  # noqa: A002 - the field's name everywhere
    summary: bool,
) -> pb.ListExportsRequest:
    """Return the request of ``list_exports`` for the first page."""
    view = pb.EXPORT_VIEW_SUMMARY if summary else pb.EXPORT_VIEW_FULL
    parent = sendable(f"projects/{project}")
    return pb.ListExportsRequest(parent=parent, page_size=page_size, filter=sendable(filter), view=view)


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    return {sendable(name): sendable(value) for name, value in values.items()}


def with_trace(metadata: Metadata) -> Metadata:
    """Return a call's metadata with the trace it belongs to."""
    traceparent = current_traceparent()
    return (*metadata, ("traceparent", traceparent)) if traceparent else metadata


class Resumption:
    """The state of one watch.

    Args:
        after_sequence: Number of the last event already seen.
        patience_seconds: How long the coordinator may be unavailable at a time.
    """

    def __init__(self, after_sequence: int, *, patience_seconds: float) -> None:
        self.sequence = after_sequence
        self.ended = False
        self._patience = patience_seconds
        self._was_connected = False
        self._gone_since: float | None = None
        self._failures = 0

    def is_new(self, event: pb.ExportEvent) -> bool:
        """Record an event; return False for one seen before the connection was lost."""
        self._was_connected, self._gone_since, self._failures = True, None, 0
        if event.sequence <= self.sequence:
            return False
        self.sequence = event.sequence
        self.ended = event.WhichOneof("event") == "export" and event.export.state in ENDED
        return True

    def pause_seconds(self, failure: Failure) -> float:
        """Return how long to wait before connecting again; raise at once if the first connection never succeeded.

        Raises:
            ModelExportError: The failure, if another connection cannot help or patience is over.
        """
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        patience = self._patience if self._was_connected else 0.0
        # A server that stops cancels its streams; a server also ends streams whose client reads too slowly.
        if not is_temporary(failure, "CANCELLED", "TRANSFER_SLOW") or now - self._gone_since >= patience:
            raise failure.error()
        self._failures += 1
        longest = min(_FIRST_PAUSE_SECONDS * 2 ** min(self._failures, 10), _LONGEST_PAUSE_SECONDS)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - so that many watchers do not return all at once


def is_temporary(failure: Failure, *reasons: str) -> bool:
    """Return whether the same call may succeed later: the peer is unavailable, or the reason is one of those given."""
    return failure.reason in reasons or (
        failure.reason in REASONS and REASONS[failure.reason].category is Category.UNAVAILABLE
    )
