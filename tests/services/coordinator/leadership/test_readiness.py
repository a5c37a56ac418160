"""When a standby is ready: with a main port that leads to the active coordinator, whatever its other ports lead to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipway.security.server import ServerSecurity
from slipway_coordinator.leadership.file_lock import FileLock
from slipway_coordinator.leadership.forwarding import Forwarder
from slipway_coordinator.leadership.standby import HealthPort, stand_by
from support.servers.free_ports import free_port

SERVICE = "slipway.v1.ExportService"


async def status(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        return int(answer.status)


async def test_a_port_that_the_active_coordinator_lacks_does_not_count(tmp_path: Path) -> None:
    leader = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    leads_to = f"127.0.0.1:{leader.sockets[0].getsockname()[1]}"
    held, lock = FileLock(tmp_path / "state.db"), FileLock(tmp_path / "state.db")
    assert held.acquire()
    lock.leader = leads_to  # as the database says it
    main, http = Forwarder("127.0.0.2:0"), Forwarder("127.0.0.2:0", same_port=True)
    address, ended = f"127.0.0.1:{free_port()}", asyncio.Event()
    health = HealthPort(address, (SERVICE,), ServerSecurity().interceptor())
    for each in (main, http, health):
        await (each.start() if isinstance(each, HealthPort) else each.listen())
    standing = asyncio.create_task(stand_by(lock, main, health, ended=ended, own="", others=[http]))
    try:
        async with asyncio.timeout(60):
            while await status(address) != health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.05)
        assert (main.reachable, http.reachable) == (True, False)
        leader.close()
        await leader.wait_closed()
    finally:
        ended.set()
        await standing
        for forwarder in (main, http):
            await forwarder.close()
        await health.stop()
        held.release()
