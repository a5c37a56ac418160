"""``slipway.v1.ExportService``: the public API."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from slipway.artifacts.blobs import Blobs
from slipway.artifacts.digests import is_digest
from slipway.errors import ServiceError
from slipway.observability.telemetry import new_trace
from slipway.planning.calibration import check_texts_apart
from slipway.rpc.serving import Context, call_traceparent, stream, unary
from slipway.security.access.principals import OWNER
from slipway.security.interceptor import current_principal
from slipway.security.limits import limit_error
from slipway.sources.addresses import NOWHERE, Allowed
from slipway.texts import hidden_character, quoted
from slipway_coordinator.api.artifact_service import require_artifacts
from slipway_coordinator.api.base_size import base_weight_bytes
from slipway_coordinator.api.messages import ExportsEvents, event_message, export_message
from slipway_coordinator.api.plans import Plans
from slipway_coordinator.api.requests import (
    ID,
    check_understood,
    field_error,
    is_oldest_first,
    page_of,
    page_size,
    project_of,
    projects_of,
)
from slipway_coordinator.coordinator import Coordinator
from slipway_coordinator.lifecycle.importing import import_task
from slipway_coordinator.lifecycle.quotas import FULL, check_priority
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, TaskRecord
from slipway_coordinator.storage.changes import Position
from slipway_coordinator.storage.filters import in_projects, page_start, page_token, parse_filter, parse_predicate
from slipway_protos.v1 import export_pb2, export_pb2_grpc

_NAME = re.compile(rf"projects/{ID}/exports/{ID}")
_REQUEST_ID = re.compile(r"[!-~]{1,64}")
_PAGE_SIZE = 50
_MAX_PAGE_SIZE = 1000  # of summaries
_MAX_FULL_PAGE_SIZE = 100
_MAX_PRIORITY = 100
_LABEL_LENGTH, _LABEL_BYTES = 100, 2048  # as wide as the table, and as much as PostgreSQL takes into an index
_CANCEL_WAIT_SECONDS = 2.0


class ExportService(export_pb2_grpc.ExportServiceServicer):
    """Exports over one coordinator.

    Args:
        coordinator: The coordinator.
        open_blobs: Opens the artifact store.
    """

    def __init__(self, coordinator: Coordinator, open_blobs: Callable[[], Blobs]) -> None:
        self._coordinator, self._open_blobs = coordinator, open_blobs
        self._exports_events, self._plans = ExportsEvents(), Plans()

    @unary
    async def CreateExport(self, request: export_pb2.CreateExportRequest, context: Context) -> export_pb2.Export:
        """Create and start an export, or return the one that the same request made before."""
        make = functools.partial(
            new_record,
            request,
            traceparent=call_traceparent(context) or new_trace(),
            creator=_creator(),
            import_from=self._coordinator.options.import_from,
            plans=self._plans,
        )
        record = make()
        limits = self._coordinator.projects().limits(record.project)
        check_priority(record.priority, record.project, limits)
        await require_artifacts(self._coordinator, record.project, record.sources.values())
        if size := await base_weight_bytes(record, self._open_blobs):
            record = make(weight_bytes=size)
        if request.validate_only:
            await self._coordinator.admission.check_usage(record)
            return export_message(record)
        full: ServiceError | None = None
        try:
            if await self._coordinator.create(record) is not None:
                return export_message(record)
        except ServiceError as error:
            if error.reason not in FULL:
                raise
            full = error
        existing = await self._find_earlier(record, named=bool(request.export_id))
        if existing is None and full is not None:
            raise full
        if existing is None:
            raise ServiceError(
                f"{record.name} was created and deleted meanwhile", reason="COORDINATOR_UNAVAILABLE", remedy="try again"
            )
        return export_message(existing)

    async def _find_earlier(self, record: ExportRecord, *, named: bool) -> ExportRecord | None:
        """Return the export that the same request made before, found by ``request_id`` or else by the export's name.

        Raises:
            ServiceError: reason ``EXPORT_EXISTS`` when another request made it.
        """
        if record.request_id:
            database = self._coordinator.database
            existing = await self._coordinator.call(lambda: database.of_request(record.project, record.request_id))
            if existing is not None:
                if existing.request_hash != record.request_hash or (named and existing.name != record.name):
                    raise _exists_error(
                        existing, f"the request_id {record.request_id!r} made {existing.name}", "request_id"
                    )
                return existing
        existing = await self._coordinator.load(record.name)
        if existing is not None and existing.request_hash != record.request_hash:
            raise _exists_error(existing, f"{record.name} was created", "export_id")
        return existing

    @unary
    async def GetExport(self, request: export_pb2.GetExportRequest, context: Context) -> export_pb2.Export:
        """Return one export."""
        return export_message(await self._require_export(request.name))

    @unary
    async def ListExports(
        self, request: export_pb2.ListExportsRequest, context: Context
    ) -> export_pb2.ListExportsResponse:
        """Return a page of exports, newest first."""
        most = _MAX_PAGE_SIZE if request.view == export_pb2.EXPORT_VIEW_SUMMARY else _MAX_FULL_PAGE_SIZE
        size = page_size(request.page_size, default=_PAGE_SIZE, most=most)
        if request.view not in export_pb2.ExportView.values():
            raise field_error("view", request.view, f"is one of {', '.join(export_pb2.ExportView.keys())}")
        projects = projects_of(request.parent, current_principal.get())
        conditions = [*in_projects(projects), *parse_filter(request.filter)]
        oldest_first = is_oldest_first(request.order_by)
        query = (request.parent, request.filter, *(["oldest first"] if oldest_first else []))
        after = page_start(request.page_token, query=query)
        database = self._coordinator.database
        exports, last = await self._coordinator.call(
            lambda: page_of(database, conditions, size=size, after=after, view=request.view, oldest_first=oldest_first)
        )
        token = "" if last is None else page_token(last, query=query)
        return export_pb2.ListExportsResponse(exports=exports, next_page_token=token)

    @unary
    async def CancelExport(self, request: export_pb2.CancelExportRequest, context: Context) -> export_pb2.Export:
        """Cancel an export; return once that took effect, or after a short wait. Does nothing if it is cancelled already."""
        record = await self._require_export(request.name)
        if _is_cancelled(record):
            return export_message(record)
        _check_etag(record, request.etag)
        if record.state.ended:
            raise _wrong_state_error(record, "cannot be cancelled any more")
        await self._coordinator.cancel(record)
        deadline = time.monotonic() + _CANCEL_WAIT_SECONDS
        while not record.state.ended and not _is_cancelled(record) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            record = await self._require_export(request.name)
        return export_message(record)

    @unary
    async def RetryExport(self, request: export_pb2.RetryExportRequest, context: Context) -> export_pb2.Export:
        """Run an unsuccessful export again. Does nothing if a retry is under way already."""
        record = await self._require_export(request.name)
        if record.run > 1 and record.state in {ExportState.QUEUED, ExportState.RUNNING}:
            return export_message(record)
        _check_etag(record, request.etag)
        if record.state not in {ExportState.FAILED, ExportState.CANCELLED}:
            raise _wrong_state_error(record, "can be retried only after it failed or was cancelled")
        return export_message(await self._coordinator.retry(record))

    @unary
    async def DeleteExport(
        self, request: export_pb2.DeleteExportRequest, context: Context
    ) -> export_pb2.DeleteExportResponse:
        """Forget an ended export. Does nothing if there is no such export."""
        record = await self._find_export(request.name)
        if record is None:
            return export_pb2.DeleteExportResponse()
        _check_etag(record, request.etag)
        if not record.state.ended:
            raise _wrong_state_error(record, "must end before it can be deleted: cancel it first")
        await self._coordinator.delete(record)
        return export_pb2.DeleteExportResponse()

    @stream
    async def WatchExport(
        self, request: export_pb2.WatchExportRequest, context: Context
    ) -> AsyncIterator[export_pb2.ExportEvent]:
        """Stream the export's events until it ends."""
        await self._require_export(request.name)
        await context.send_initial_metadata(())  # the call is admitted: the client waits for events from now on
        async for event in self._coordinator.hub.watch(request.name, after=request.after_sequence):
            yield event_message(event)

    @stream
    async def WatchExports(
        self, request: export_pb2.WatchExportsRequest, context: Context
    ) -> AsyncIterator[export_pb2.ExportsEvent]:
        """Stream what happens to exports of some projects."""
        projects, matches = projects_of(request.parent, current_principal.get()), parse_predicate(request.filter)
        start = _position(request.cursor)
        if start is not None:
            await self._coordinator.feed.check(start)
        await context.send_initial_metadata(())  # the call is admitted: the client waits for events from now on
        events = self._coordinator.feed.watch(
            start, projects=projects, matches=matches, progress=request.include_progress
        )
        async with contextlib.aclosing(events):
            async for event in events:
                yield self._exports_events.of(event)

    async def _find_export(self, name: str) -> ExportRecord | None:
        if not _NAME.fullmatch(name):
            raise field_error("name", name, "is like projects/default/exports/my-export")
        return await self._coordinator.load(name)

    async def _require_export(self, name: str) -> ExportRecord:
        record = await self._find_export(name)
        if record is None:
            raise ServiceError(
                f"there is no export {name}",
                reason="EXPORT_NOT_FOUND",
                remedy="slipway list shows the existing exports",
                about={"export": name},
            )
        return record


def _position(cursor: str) -> Position | None:
    """Return the place that a watcher continues from; None for now.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    if not cursor:
        return None
    position = Position.parse(cursor)
    if position is None:
        raise field_error("cursor", cursor, "is that of an event received before, or empty")
    return position


def new_record(
    request: export_pb2.CreateExportRequest,
    *,
    traceparent: str = "",
    creator: str = "",
    import_from: Allowed = NOWHERE,
    weight_bytes: int = 0,
    plans: Plans | None = None,
) -> ExportRecord:
    """Return the export a request asks for, planned but not stored.

    Args:
        request: The client's request.
        traceparent: Span that the export belongs to.
        creator: Name of the caller.
        import_from: Addresses of sources that may be imported.
        weight_bytes: Size of the base's weights, by which large work is divided; 0 while unknown.
        plans: Has the plans of requests before; None plans anew.

    Raises:
        ModelExportError: reason ``REQUEST_INVALID``, ``LIMIT_EXCEEDED``, ``CONFIGURATION_INVALID``, ``CALIBRATION_OVERLAP`` or
            ``SOURCE_NOT_ALLOWED``.
    """
    check_understood(request)
    project = project_of(request.parent)
    export_id = request.export_id or uuid.uuid4().hex
    if not re.fullmatch(ID, export_id):
        raise field_error(
            "export_id",
            export_id,
            "takes 1 to 63 of a-z, 0-9, '.', '_' and '-', and begins and ends with a letter or digit",
        )
    for name, digest in sorted(request.sources.items()):
        if not is_digest(digest):
            raise field_error(f"sources[{name}]", digest, "is a manifest digest like sha256:<64 hex digits>")
    if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
        raise field_error("request_id", request.request_id, "takes 1 to 64 printable characters without spaces")
    if not -_MAX_PRIORITY <= request.priority <= _MAX_PRIORITY:
        raise field_error("priority", request.priority, f"is between -{_MAX_PRIORITY} and {_MAX_PRIORITY}")
    for name, value in sorted(request.labels.items()):
        _check_label(name, value)
    sources = dict(sorted(request.sources.items()))
    formats = {name: stored for name, stored in sorted(request.source_formats.items()) if stored}
    plans = plans or Plans()
    planned = plans.of(request.configuration, sources, formats=formats, weight_bytes=weight_bytes)
    for url in filter(None, planned.imports.values()):
        import_from.check(url, project=project)
    check_texts_apart(planned.configuration, {**planned.imports, **sources})
    tasks = planned.tasks
    if planned.imports:  # the other tasks are planned once these are artifacts
        tasks = (TaskRecord.from_plan(import_task(planned.configuration, sources, planned.imports)),)
    return ExportRecord(
        name=f"projects/{project}/exports/{export_id}",
        configuration=planned.recorded,
        request_hash=request_hash(planned.chosen, sources, formats),
        request_id=request.request_id,
        creator=creator,
        needs_gpu=planned.needs_gpu,
        priority=request.priority,
        sources=sources,
        labels=dict(sorted(request.labels.items())),
        tasks=tasks,
        traceparent=traceparent,
        create_time=time.time(),
    )


def request_hash(chosen: Mapping[str, Any], sources: Mapping[str, str], source_formats: Mapping[str, str]) -> str:
    """Return the SHA-256 of the fields that a client set. Labels and priority do not affect the result and are left out.

    Args:
        chosen: Settings of the configuration (:func:`~slipway_coordinator.api.plans.chosen_settings`).
        sources: Digests of sources, by name.
        source_formats: Storage formats of sources, by name.
    """
    asked = {"configuration": chosen, "sources": dict(sources)}
    if source_formats:
        asked["source_formats"] = dict(source_formats)
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _check_label(name: str, value: str) -> None:
    for text in (name, value):
        hidden = hidden_character(text)
        if hidden:  # labels are shown to other users, in terminals and on pages
            raise ServiceError(
                f"the label {quoted(name)} has the character {hidden}",
                reason="REQUEST_INVALID",
                remedy="leave it out",
                about={"field": "labels"},
            )
    if len(name) > _LABEL_LENGTH:
        raise limit_error(
            f"the label {name[:20]}… has {len(name)} characters, {_LABEL_LENGTH} are allowed", field="labels"
        )
    size = len(value.encode())
    if size > _LABEL_BYTES:
        raise limit_error(f"labels[{name}] has {size} bytes, {_LABEL_BYTES} are allowed", field="labels")


def _creator() -> str:
    """Return the caller's name; empty where anonymous callers are allowed."""
    principal = current_principal.get()
    return "" if principal is OWNER else principal.name


def _exists_error(existing: ExportRecord, what: str, field: str) -> ServiceError:
    return ServiceError(
        f"{what} from another configuration or other sources",
        reason="EXPORT_EXISTS",
        remedy=f"choose another {field}, or delete that export",
        about={"export": existing.name, "field": field},
    )


def _is_cancelled(record: ExportRecord) -> bool:
    """Return whether an export was cancelled, or is about to be."""
    return record.state in {ExportState.CANCELLED, ExportState.CANCELLING}


def _check_etag(record: ExportRecord, etag: str) -> None:
    if etag and etag != record.etag:
        raise ServiceError(
            f"{record.name} changed meanwhile: its etag is {record.etag}, not {etag}",
            reason="ETAG_MISMATCH",
            remedy="read the export again",
            about={"export": record.name, "etag": record.etag},
        )


def _wrong_state_error(record: ExportRecord, rule: str) -> ServiceError:
    about = {"export": record.name, "state": record.state.value}
    return ServiceError(f"{record.name} is {record.state.value}, it {rule}", reason="EXPORT_STATE", about=about)
