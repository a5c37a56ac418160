"""Check a caller's rights again and again while a stream without end goes on: its token may end, and the access file may change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from slipway.errors import ModelExportError, ServiceError
from slipway.security.access.principals import Principal

_UNKNOWN = frozenset({"ISSUER_UNAVAILABLE"})
"""Reasons of checks that say nothing about the caller."""


@contextlib.asynccontextmanager
async def rechecking(check: Callable[[], Awaitable[None]], *, seconds: float) -> AsyncIterator[None]:
    """Repeat a check while the block runs, and end the block if it fails.

    Args:
        check: Raises ModelExportError if the block must not go on.
        seconds: Pause before each check.

    Raises:
        ModelExportError: What the check raised.
    """
    refusals: list[ModelExportError] = []

    async def repeat(limit: asyncio.Timeout) -> None:
        while not refusals:
            await asyncio.sleep(seconds)
            try:
                await check()
            except ModelExportError as error:
                if error.reason not in _UNKNOWN:
                    refusals.append(error)
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


def check_unchanged(before: Principal, now: Principal) -> None:
    """Check that a caller may still do and see what it could when its stream began.

    Raises:
        ServiceError: reason ``RIGHTS_CHANGED``.
    """
    if (before.roles, before.projects) != (now.roles, now.projects):
        raise ServiceError(
            f"the rights of {now.name} have changed since this stream began",
            reason="RIGHTS_CHANGED",
            remedy="call again, with the last cursor",
        )
