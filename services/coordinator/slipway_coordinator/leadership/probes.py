"""A port without TLS for health probes; it serves nothing else."""

from __future__ import annotations

import grpc

from slipway.rpc.serving import SERVER_OPTIONS, add_health_and_reflection, listen
from slipway.security.interceptor import AccessInterceptor


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
