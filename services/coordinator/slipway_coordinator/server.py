"""The coordinator on the network: one gRPC server over one :class:`Coordinator`."""

from __future__ import annotations

import asyncio
import logging
import signal

import grpc

from slipway.metrics import reading
from slipway.rpc import SERVER_OPTIONS, add_health_and_reflection, listen, set_serving
from slipway_coordinator.coordinator import Coordinator, CoordinatorOptions
from slipway_coordinator.lock import StateLock
from slipway_coordinator.observation import Gauges
from slipway_coordinator.scaler import SERVICE as SCALER
from slipway_coordinator.scaler import ExternalScaler
from slipway_coordinator.service import ExportService
from slipway_coordinator.worker_service import WorkerService
from slipway_protos.externalscaler import externalscaler_pb2_grpc
from slipway_protos.v1 import export_pb2_grpc, worker_pb2_grpc

log = logging.getLogger("slipway.coordinator")

SERVICES = ("slipway.v1.ExportService", "slipway.v1.WorkerService", SCALER)


class CoordinatorServer:
    """A coordinator that serves at an address, from :meth:`start` to :meth:`stop`. The caller holds the state's lock."""

    def __init__(self, options: CoordinatorOptions, *, address: str) -> None:
        self.coordinator = Coordinator(options)
        self._address = address
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._checks = add_health_and_reflection(self._server, *SERVICES)
        export_pb2_grpc.add_ExportServiceServicer_to_server(ExportService(self.coordinator), self._server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(self.coordinator), self._server)
        scaler = ExternalScaler(self.coordinator.broker)
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(scaler, self._server)
        self.port = 0

    async def start(self) -> None:
        """Go on with what is stored, then take calls.

        Raises:
            ServiceError: the address cannot be bound.
        """
        self.port = listen(self._server, self._address)
        await self.coordinator.start()
        await self._server.start()
        await set_serving(self._checks, *SERVICES, serving=True)

    async def stop(self) -> None:
        """Take no more calls, end those that wait, and stop."""
        await self._checks.enter_graceful_shutdown()
        await self._server.stop(grace=0.2)
        await self.coordinator.stop()


async def serve(options: CoordinatorOptions, *, address: str) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ServiceError: reason ``COORDINATOR_LOCKED``, or the address cannot be bound.
    """
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    with StateLock(options.state):
        server = CoordinatorServer(options, address=address)
        await server.start()
        log.info(f"coordinator on {address} (port {server.port}), state {options.state}")
        try:
            with reading(Gauges(server.coordinator.broker, active=lambda: True)):
                await ended.wait()
        finally:
            await server.stop()
