"""The plain port for probes, which speak no TLS: it answers health checks, and there is nothing else behind it."""

from __future__ import annotations

import grpc

from slipway.rpc.serving import SERVER_OPTIONS, add_health_and_reflection, listen
from slipway.security.interceptor import AccessInterceptor


class HealthPort:
    """Says whether this process takes connections, from :meth:`start` to :meth:`stop`, whoever serves them meanwhile.

    Args:
        address: ``HOST:PORT``; empty for none.
        services: Names that probes ask for.
        access: Bounds the calls.
    """

    def __init__(self, address: str, services: tuple[str, ...], access: AccessInterceptor) -> None:
        self._address = address
        self._services = services
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[access])
        self._health = add_health_and_reflection(self._server, *services)

    async def start(self) -> None:
        """Answer, for the time being that nothing is served.

        Raises:
            ServiceError: reason ``REQUEST_INVALID`` when the address cannot be bound.
        """
        if self._address:
            listen(self._server, self._address)
            self.say(serving=False)
            await self._server.start()

    def say(self, *, serving: bool) -> None:
        """Say from now on whether connections are taken."""
        self._health.set_serving(*self._services, serving=serving)

    async def stop(self) -> None:
        """Answer no more."""
        self._health.end()
        await self._server.stop(grace=None)
