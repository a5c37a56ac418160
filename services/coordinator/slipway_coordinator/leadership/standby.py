"""A standby waits for the lock and meanwhile forwards connections to the active coordinator; its health port only answers probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

import grpc

from slipway.rpc.serving import SERVER_OPTIONS, add_health_and_reflection, listen
from slipway.security.interceptor import AccessInterceptor
from slipway_coordinator.leadership.file_lock import StateLock
from slipway_coordinator.leadership.forwarding import Forwarder

log = logging.getLogger("slipway.coordinator.standby")

LOOK_SECONDS = 0.5

# If the active coordinator ends a connection, it may be shutting down: check the lock more often for a while.
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
    others: Sequence[Forwarder] = (),
) -> bool:
    """Wait for the lock; return False if this process is told to end first.

    Args:
        lock: The lock of a shared state; not held.
        forwarder: Listens already.
        health: Reports serving while connections can be forwarded.
        ended: Set when this process should end.
        own: The --advertise address of this process, if given.
        others: The forwarders of other ports, for clients with a token and for HTTP; they listen already.
    """
    alarmed_until = 0.0
    while not await asyncio.to_thread(lock.acquire):
        leader = lock.leader
        if leader and leader in {own, forwarder.address}:
            log.error(f"another coordinator advertises this one's address, {leader}: give each its own --advertise")
            leader = ""
        await forwarder.forward_to(leader)
        for other in others:
            await other.forward_to(leader)
        # Report ready without a known leader too: this process will be the next, and a rollout waits for readiness.
        # Other ports do not count: the leader may lack one that only newer coordinators are given, or have it on loopback.
        health.report(serving=lock.answers and (forwarder.reachable or not leader))
        if forwarder.left.is_set():
            forwarder.left.clear()
            alarmed_until = time.monotonic() + _ALARM_SECONDS
        pause = _LOOK_ALARMED_SECONDS if time.monotonic() < alarmed_until else LOOK_SECONDS
        await _wait_for_any(ended, forwarder.left, seconds=pause)
        if ended.is_set():
            return False
    return True


def advertised_address(given: str, *, address: str, near_database: str) -> str:
    """Return the address at which standbys reach this process when it is active; empty if it cannot be derived.

    Args:
        given: The address the operator gave, if any.
        address: The address it listens on.
        near_database: The address of this machine that the database sees.
    """
    host, _, port = address.rpartition(":")
    if given or address.startswith("unix:"):
        return given
    if host not in _WILDCARDS:
        return address
    if not near_database or near_database.startswith(_LOOPBACK):  # the database is behind a proxy on this machine
        return ""
    return f"[{near_database}]:{port}" if ":" in near_database else f"{near_database}:{port}"


async def _wait_for_any(*events: asyncio.Event, seconds: float) -> None:
    """Wait until one of several events is set, or some seconds have passed."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waiting, return_exceptions=True)


class HealthPort:
    """Reports from :meth:`start` to :meth:`stop` whether this process takes connections, as standby or as active coordinator.

    Args:
        address: ``HOST:PORT``; empty for none.
        services: Service names that probes may ask for.
        access: Limits the calls.
    """

    def __init__(self, address: str, services: tuple[str, ...], access: AccessInterceptor) -> None:
        self._address = address
        self._services = services
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[access])
        self._health = add_health_and_reflection(self._server, *services)

    async def start(self) -> None:
        """Listen, and report not serving until told otherwise.

        Raises:
            ServiceError: reason ``REQUEST_INVALID`` when the address cannot be bound.
        """
        if self._address:
            listen(self._server, self._address)
            self.report(serving=False)
            await self._server.start()

    def report(self, *, serving: bool) -> None:
        """Report from now on whether connections are taken."""
        self._health.set_serving(*self._services, serving=serving)

    async def stop(self) -> None:
        """Stop listening."""
        self._health.end()
        await self._server.stop(grace=None)
