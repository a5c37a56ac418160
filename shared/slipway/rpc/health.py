"""``grpc.health.v1.Health``: report whether a server and its services take calls.

We have our own because the asyncio servicer of ``grpcio-health-checking`` has no ``List``, and sends to its watchers while it holds
a lock: one watcher that does not read would block all others and the server's shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Context = grpc.aio.ServicerContext
State = Any  # the number of a ServingStatus, whose stubs have no type for it

_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):
    """Keeps the states of services by name; the empty name stands for the whole server."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {"": health_pb2.HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()  # set at the next change, then replaced
        self._is_ending = False

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Return the state of one service."""
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no service of this name")
        return health_pb2.HealthCheckResponse(status=state)

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """Return the states of all services."""
        states = {name: health_pb2.HealthCheckResponse(status=state) for name, state in sorted(self._states.items())}
        return health_pb2.HealthListResponse(statuses=states)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Send the state of one service, now and whenever it changes."""
        told = None
        while True:
            changed, state = self._changed, self._states.get(request.service, _UNKNOWN)
            if state != told:
                yield health_pb2.HealthCheckResponse(status=state)
                told = state
            await changed.wait()

    def set_serving(self, *services: str, serving: bool) -> None:
        """Set whether some services, and the server as a whole, take calls. After :meth:`end` this has no effect."""
        if not self._is_ending:
            self._set(("", *services), serving=serving)

    def end(self) -> None:
        """Report from now on that no service takes calls."""
        self._is_ending = True
        self._set(tuple(self._states), serving=False)

    def _set(self, services: tuple[str, ...], *, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        self._states.update(dict.fromkeys(services, state))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
