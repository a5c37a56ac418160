"""Names and requests, the same for both clients."""

from __future__ import annotations

from collections.abc import Mapping

from slipway.configuration import ExportConfiguration
from slipway.observability.telemetry import current_traceparent
from slipway.rpc.configuration_messages import asked_configuration_message
from slipway.rpc.structs import sendable
from slipway_protos.v1 import export_pb2 as pb

DEFAULT_PROJECT = "default"
TIMEOUT_SECONDS = 30.0

Metadata = tuple[tuple[str, str], ...]


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
