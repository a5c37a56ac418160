"""2,000 queued exports of three projects drain fairly through a coordinator's own process: each is run once, and no project waits for another."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from slipway.configuration import parse
from slipway.rpc.messages import configuration_message
from slipway_protos.v1 import export_pb2, export_pb2_grpc, worker_pb2, worker_pb2_grpc
from support.commands.cli import SLIPWAY
from support.coordinators.harness import DIGEST, process, wait_for
from support.servers.free_ports import free_port

CONFIGURATION = configuration_message(
    parse({"formats": {"onnx": {"enabled": False}}, "validation": {"enabled": False}})
)
EXPORTS, WINDOW, WORKERS, CREATING = 2000, 300, 4, 8
PRIORITIES = {"a": 100, "b": 0, "c": -100}
PROJECTS = sorted(PRIORITIES)


async def create(address: str) -> None:
    """Create the exports, one project after the other."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = export_pb2_grpc.ExportServiceStub(channel)
        left = iter([(name, number) for name in PROJECTS for number in range(EXPORTS) if number % 3 == ord(name) % 3])

        async def go() -> None:
            for project, number in left:
                request = export_pb2.CreateExportRequest(
                    parent=f"projects/{project}",
                    export_id=f"e{number}",
                    configuration=CONFIGURATION,
                    priority=PRIORITIES[project],
                    sources={"base": DIGEST, "adapter": DIGEST},
                )
                await stub.CreateExport(request)

        await asyncio.gather(*(go() for _ in range(CREATING)))


async def drain(address: str) -> list[str]:
    """Run every task; return the exports in the order in which workers got them."""
    leased: list[str] = []

    async def work(name: str) -> None:
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            while len(leased) < EXPORTS:
                request = worker_pb2.SynchronizeRequest(
                    worker_id=name, stages=["merge"], free_slots=1, max_wait=Duration(seconds=1)
                )
                for lease in (await stub.Synchronize(request)).leases:
                    leased.append(lease.task.partition(":")[0])
                    output = worker_pb2.TaskOutput(outputs={"pytorch": DIGEST})
                    await stub.CompleteTask(
                        worker_pb2.CompleteTaskRequest(
                            worker_id=name, task=lease.task, lease_epoch=lease.lease_epoch, output=output
                        )
                    )

    await asyncio.gather(*(work(f"worker-{number}") for number in range(WORKERS)))
    return leased


async def succeeded(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub, found, token = export_pb2_grpc.ExportServiceStub(channel), 0, ""
        while True:
            request = export_pb2.ListExportsRequest(
                parent="projects/-", page_size=1000, page_token=token, filter="state=succeeded"
            )
            page = await stub.ListExports(request)
            found, token = found + len(page.exports), page.next_page_token
            if not token:
                return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_2000_exports_of_three_projects_drain_fairly(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = [SLIPWAY, "coordinator", "--listen", address, "--state", str(tmp_path / "state.db")]
    with process(command, tmp_path / "log", SLIPWAY_HOME=str(tmp_path)):
        channel = grpc.insecure_channel(address)
        grpc.channel_ready_future(channel).result(300)
        channel.close()
        asyncio.run(create(address))
        leased = asyncio.run(drain(address))
        wait_for(lambda: asyncio.run(succeeded(address)) == EXPORTS, seconds=300)
    assert len(leased) == len(set(leased)) == EXPORTS, "each is run once"
    order = [name.split("/")[1] for name in leased]
    everybody = min(max(at for at, name in enumerate(order) if name == project) for project in PROJECTS)
    assert everybody > 0.95 * EXPORTS, "no project is done long before another"
    for at in range(everybody - WINDOW + 1):
        counts = Counter(order[at : at + WINDOW])
        assert all(abs(3 * counts[name] / WINDOW - 1) <= 0.10 for name in PROJECTS), (at, counts)
