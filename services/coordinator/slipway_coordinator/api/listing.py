"""Pages of exports: as many as requested, but never larger than a client accepts in one response."""

from __future__ import annotations

from collections.abc import Sequence

from slipway_coordinator.api.messages import export_message, export_summary
from slipway_coordinator.model.records import ExportRecord
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.filters import Condition
from slipway_protos.v1 import export_pb2 as pb

PAGE_BYTES = 3 << 20
"""Limit for the exports in one response: gRPC clients accept 4 MiB by default."""

_ITEM_BYTES = 8  # tag and length
_READ_AT_ONCE = 20  # reading records holds the interpreter: other threads take their turn between

Place = tuple[float, str]
"""Position of an export in a list: its creation time and name."""


def page_of(
    database: Database, conditions: Sequence[Condition], *, size: int, after: Place | None, view: pb.ExportView
) -> tuple[list[pb.Export], Place | None]:
    """Return the exports of a page, newest first, and the place of the last one if more follow. Blocks.

    Args:
        database: The coordinator's database.
        conditions: On the table of exports; see :mod:`slipway_coordinator.storage.filters`.
        size: How many at most.
        after: Place of the last one of the page before.
        view: How much of each export. An export too large for one response is returned as its summary.
    """
    page, room = list[pb.Export](), PAGE_BYTES
    while True:
        limit = min(_READ_AT_ONCE, size - len(page) + 1)  # one more than wanted shows whether any follow
        found = database.page(conditions, limit=limit, after=after)
        for record in found:
            message = _seen(record, view)
            room -= message.ByteSize() + _ITEM_BYTES
            if len(page) == size or (page and room < 0):
                return page, after
            page.append(message)
            after = (record.create_time, record.name)
        if len(found) < limit:
            return page, None


def _seen(record: ExportRecord, view: pb.ExportView) -> pb.Export:
    if view == pb.EXPORT_VIEW_SUMMARY:
        return export_summary(record)
    message = export_message(record)
    return message if message.ByteSize() <= PAGE_BYTES else export_summary(record)
