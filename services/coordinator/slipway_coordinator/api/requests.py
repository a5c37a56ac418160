"""Check clients' requests (project names, page sizes, fields of clients newer than this program), and make pages of exports."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from slipway.errors import ServiceError
from slipway.security.access.principals import ALL_PROJECTS, Principal
from slipway.texts import quoted, shortened
from slipway_coordinator.api.messages import export_message, export_summary
from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_coordinator.lifecycle.summaries import ExportSummary
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.filters import Condition
from slipway_protos.v1 import export_pb2 as pb

ID = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
"""Pattern of the id of a project or an export."""
_PARENT = re.compile(rf"projects/({ID})")
ALL_PROJECTS_PARENT = "projects/-"
"""The parent that stands for all projects."""

PAGE_BYTES = 3 << 20
"""Limit for the exports in one response: gRPC clients accept 4 MiB by default."""

ITEM_BYTES = 8
"""Size of the tag and length of an item in a response."""
_READ_AT_ONCE, _SUMMARIES_AT_ONCE = 20, 200
"""Reading them holds the interpreter lock; other threads run between batches."""

Place = tuple[float, str]
"""Position of an export in a list: its creation time and name."""


def project_of(parent: str) -> str:
    """Return the project that ``parent`` names.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    match = _PARENT.fullmatch(parent)
    if match is None:
        raise field_error("parent", parent, "is like projects/default")
    return match[1]


def projects_of(parent: str, principal: Principal) -> Collection[str] | None:
    """Return the projects that the ``parent`` of a list names: with ``projects/-`` all that the caller may see; None for all there are.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    if parent != ALL_PROJECTS_PARENT:
        return [project_of(parent)]
    return None if ALL_PROJECTS in principal.projects else principal.projects


def is_oldest_first(order_by: str) -> bool:
    """Return whether a list begins with the oldest export.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    words = order_by.split()
    if words not in ([], ["create_time"], ["create_time", "desc"]):
        raise field_error(
            "order_by", order_by, "is 'create_time desc' (the default), or 'create_time' for the oldest first"
        )
    return words == ["create_time"]


def page_size(requested: int, *, default: int, most: int) -> int:
    """Return the size of a page; 0 requests the default.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    if requested < 0:
        raise field_error("page_size", requested, "is 0 (for the default) or more")
    return min(requested or default, most)


def field_error(field: str, value: object, rule: str) -> ServiceError:
    """Return the error that refuses a field's value; ``rule`` follows the word "it" in the remedy."""
    return ServiceError(
        f"{shortened(field)} is {quoted(value)}", reason="REQUEST_INVALID", remedy=f"it {rule}", about={"field": field}
    )


def check_understood(request: Message) -> None:
    """Refuse a request with fields that this program does not know: ignoring them would be silently wrong.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    if known.ByteSize() == request.ByteSize():  # a tenth of the time that looking into every message takes
        return
    unknown = next(_unknown_fields(request, type(request).DESCRIPTOR.name), None)
    if unknown is not None:
        where, number = unknown
        raise ServiceError(
            f"{where} has a field that this coordinator does not know (number {number})",
            reason="REQUEST_INVALID",
            remedy="leave out the new field, or upgrade the coordinator before its clients",
            about={"message": where, "number": number},
        )


def _unknown_fields(message: Message, where: str) -> Iterator[tuple[str, int]]:
    """Yield each unknown field: the path of the message that has it, and its number."""
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield where, unknown[index].field_number
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        inner = f"{where}.{field.name}"
        if not field.is_repeated:
            yield from _unknown_fields(value, inner)
        elif not field.message_type.GetOptions().map_entry:
            for item in value:
                yield from _unknown_fields(item, inner)
        elif field.message_type.fields_by_name["value"].message_type is not None:
            for item in value.values():
                yield from _unknown_fields(item, inner)


def page_of(
    database: Database,
    conditions: Sequence[Condition],
    *,
    size: int,
    after: Place | None,
    view: pb.ExportView,
    oldest_first: bool = False,
) -> tuple[list[pb.Export], Place | None]:
    """Return the exports of a page, and the place of the last one if more follow. Blocks.

    Args:
        database: The coordinator's database.
        conditions: On the table of exports; see :mod:`slipway_coordinator.storage.filters`.
        size: How many at most.
        after: Place of the last one of the page before.
        view: How much of each export. An export too large for one response is returned as its summary.
        oldest_first: Whether the list begins with the oldest export.
    """
    page, room = list[pb.Export](), PAGE_BYTES
    summary = view == pb.EXPORT_VIEW_SUMMARY
    read: Callable[..., Sequence[ExportRecord | ExportSummary]] = database.summaries if summary else database.page
    while True:
        most = _SUMMARIES_AT_ONCE if summary else _READ_AT_ONCE
        limit = min(most, size - len(page) + 1)  # one more than wanted shows whether any follow
        records = read(conditions, limit=limit, after=after, oldest_first=oldest_first)
        for record in records:
            message = _message(record)
            room -= message.ByteSize() + ITEM_BYTES
            if len(page) == size or (page and room < 0):
                return page, after
            page.append(message)
            after = (record.create_time, record.name)
        if len(records) < limit:
            return page, None


def _message(record: ExportRecord | ExportSummary) -> pb.Export:
    if isinstance(record, ExportSummary):
        return export_summary(record)
    message = export_message(record)
    return message if message.ByteSize() <= PAGE_BYTES else export_summary(record)
