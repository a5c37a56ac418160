"""A standby: it waits for the lock, and meanwhile leads everybody to the active coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from slipway_coordinator.leadership.file_lock import StateLock
from slipway_coordinator.leadership.forwarding import Forwarder
from slipway_coordinator.leadership.probes import HealthPort

log = logging.getLogger("slipway.coordinator.standby")

LOOK_SECONDS = 0.5

# After the active coordinator has ended a connection, it may be about to end; its lock is free a moment later.
_ALARM_SECONDS, _LOOK_ALARMED_SECONDS = 5.0, 0.1

_WILDCARDS = ("0.0.0.0", "[::]", "")  # noqa: S104 - compared with, not listened on
_LOOPBACK = ("127.", "::1")


async def stand_by(
    lock: StateLock,
    forwarder: Forwarder,
    health: HealthPort,
    *,
    ended: asyncio.Event,
    own: str,
    tokens: Forwarder | None = None,
) -> bool:
    """Wait for the lock; False when this process shall end before.

    Args:
        lock: Of a shared state; not held.
        forwarder: Listens already.
        health: Says that this process takes connections, while there is somebody to pass them on to.
        ended: Set when this process shall end.
        own: The address that this process will have when it is active, if that was given.
        tokens: The same for clients that have a token; listens already.
    """
    alarmed_until = 0.0
    while not await asyncio.to_thread(lock.acquire):
        leader = lock.leader
        if leader and leader in {own, forwarder.address}:
            log.error(f"another coordinator has this one's address, {leader}: give each an --advertise of its own")
            leader = ""
        await forwarder.point_to(leader)
        if tokens is not None:
            await tokens.point_to(leader)
        # Without a known leader it is ready too: it shall be the next, and a rollout waits for it.
        reachable = forwarder.reachable and (tokens is None or tokens.reachable)
        health.say(serving=lock.answers and (reachable or not leader))
        if forwarder.left.is_set():
            forwarder.left.clear()
            alarmed_until = time.monotonic() + _ALARM_SECONDS
        pause = _LOOK_ALARMED_SECONDS if time.monotonic() < alarmed_until else LOOK_SECONDS
        await _either(ended, forwarder.left, seconds=pause)
        if ended.is_set():
            return False
    return True


def advertised(given: str, *, address: str, near_database: str) -> str:
    """Return where standbys reach this process when it is active; empty where nobody could tell.

    Args:
        given: What the operator says.
        address: Where it listens.
        near_database: The address of this machine that the database sees.
    """
    host, _, port = address.rpartition(":")
    if given or address.startswith("unix:"):
        return given
    if host not in _WILDCARDS:
        return address
    if not near_database or near_database.startswith(
        _LOOPBACK
    ):  # a proxy beside this process: elsewhere it means another
        return ""
    return f"[{near_database}]:{port}" if ":" in near_database else f"{near_database}:{port}"


async def _either(*events: asyncio.Event, seconds: float) -> None:
    """Wait for one of some events, for some seconds at most."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waiting, return_exceptions=True)
