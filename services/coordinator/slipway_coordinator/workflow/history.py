"""Forget ended exports after their retention time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from slipway.errors import ServiceError
from slipway.security.access import audit
from slipway_coordinator.model.records import ExportRecord
from slipway_coordinator.storage.database import Database

T = TypeVar("T")

log = logging.getLogger("slipway.coordinator.history")

_WHO = "(--retain-days)"  # stands in the audit log for a principal
_EVERY_SECONDS = 600.0
_AT_ONCE = 100
_DAY_SECONDS = 86_400.0


class Exports(Protocol):
    """The part of a coordinator that forgetting needs."""

    database: Database

    async def call(self, function: Callable[[], T]) -> T:
        """Run a blocking function in a thread."""

    async def delete(self, record: ExportRecord) -> None:
        """Delete an export that ended."""


async def forget_old(coordinator: Exports, *, days: float) -> int:
    """Forget exports that ended more than ``days`` ago, their workflows, and artifacts made as long ago; return how many exports."""
    before = time.time() - days * _DAY_SECONDS
    forgotten = 0
    while old := await coordinator.call(lambda: coordinator.database.ended_before(before, limit=_AT_ONCE)):
        for record in old:
            try:
                await coordinator.delete(record)
            except ServiceError as error:
                if error.reason != "EXPORT_STATE":  # it was retried, so it is not old any more
                    raise
            else:
                audit.write("DeleteExport", outcome=audit.DONE, principal=_WHO, resource=record.name)
                forgotten += 1
    await coordinator.call(lambda: coordinator.database.ownership.forget_made(before=before))
    return forgotten


async def keep_forgetting(coordinator: Exports, *, days: float) -> None:
    """Forget old exports every few minutes, for as long as the coordinator runs."""
    while True:
        try:
            forgotten = await forget_old(coordinator, days=days)
        except ServiceError as error:
            log.warning(f"old exports cannot be forgotten now: {error}")
        except Exception:  # if this loop ended, nothing would ever be forgotten again
            log.exception("forgetting old exports failed")
        else:
            if forgotten:
                log.info(f"forgot {forgotten} exports that ended more than {days:g} days ago")
        await asyncio.sleep(_EVERY_SECONDS)
