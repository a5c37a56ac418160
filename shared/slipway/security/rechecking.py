"""Check a caller's rights again and again while a stream of events goes on: its token may end, and the access file may change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from slipway.errors import ModelExportError, ServiceError
from slipway.security.access.principals import Principal

log = logging.getLogger("slipway.security")

_UNKNOWN = frozenset({"ISSUER_UNAVAILABLE"})
"""Reasons of checks that say nothing about the caller."""
_PATIENCE_SECONDS = 600.0


@contextlib.asynccontextmanager
async def rechecking(
    check: Callable[[], Awaitable[None]], *, seconds: float, patience_seconds: float = _PATIENCE_SECONDS
) -> AsyncIterator[None]:
    """Repeat a check while the block runs, and end the block if it fails.

    Args:
        check: Raises ModelExportError if the block must not go on.
        seconds: Pause before each check.
        patience_seconds: How long the block goes on while checks say nothing about the caller, whose token may have expired by then.

    Raises:
        ModelExportError: What the check raised; reason ``INTERNAL`` for anything else than such an error.
    """
    refusals: list[ModelExportError] = []

    async def repeat(limit: asyncio.Timeout) -> None:
        clock = asyncio.get_running_loop().time
        sure = clock()
        while not refusals:
            await asyncio.sleep(seconds)
            try:
                await check()
                sure = clock()
            except ModelExportError as error:
                if error.reason not in _UNKNOWN or clock() - sure >= patience_seconds:
                    refusals.append(error)
            except Exception as error:  # whatever it is, the block must not go on unchecked
                log.exception("a caller's rights cannot be checked again")
                refusals.append(_fault(error))
        limit.reschedule(0.0)  # as if its time were over

    try:
        async with asyncio.timeout(None) as limit:
            checks = asyncio.create_task(repeat(limit))
            try:
                yield
            finally:
                checks.cancel()
    except TimeoutError as error:
        if not refusals:
            raise
        raise refusals[0] from error


def _fault(error: Exception) -> ServiceError:
    fault = ServiceError(
        "the caller's rights cannot be checked again", reason="INTERNAL", remedy="try again; the server's log says why"
    )
    fault.__cause__ = error
    return fault


def check_unchanged(before: Principal, now: Principal) -> None:
    """Check that a caller may still do and see what it could when its stream began.

    Raises:
        ServiceError: reason ``RIGHTS_CHANGED``.
    """
    if (before.roles, before.projects) != (now.roles, now.projects):
        raise ServiceError(
            f"the rights of {now.name} have changed since this stream began",
            reason="RIGHTS_CHANGED",
            remedy="call again, and continue after the last event",
        )
