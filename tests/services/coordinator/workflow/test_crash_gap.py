"""An export is durable when its creation is answered, and begins afterwards: the coordinator is killed in between."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
import sqlalchemy as sa
from google.protobuf.duration_pb2 import Duration

from slipway.configuration import parse
from slipway.rpc.messages import configuration_message
from slipway_protos.v1 import export_pb2, export_pb2_grpc, worker_pb2, worker_pb2_grpc
from support.commands.cli import SLIPWAY
from support.coordinators.harness import DIGEST, process, state
from support.servers.free_ports import free_port

CONFIGURATION = configuration_message(
    parse({"formats": {"onnx": {"enabled": False}}, "validation": {"enabled": False}})
)
EXPORTS = 60  # in a round
ROUNDS = 12
CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
]


@contextmanager
def coordinator(home: Path, place: str, address: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [SLIPWAY, "coordinator", "--listen", address, "--state", place]
    with process(command, home / "coordinator.log") as started:
        yield started


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own to a coordinator that answers."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL) as channel:
        stub = export_pb2_grpc.ExportServiceStub(channel)
        for _ in range(300):
            try:
                await stub.ListExports(export_pb2.ListExportsRequest(parent="projects/default"), timeout=2)
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
        yield channel


def creation(number: int) -> export_pb2.CreateExportRequest:
    return export_pb2.CreateExportRequest(
        parent="projects/default",
        export_id=f"e{number}",
        configuration=CONFIGURATION,
        sources={"base": DIGEST, "adapter": DIGEST},
        request_id=f"r{number}",
    )


async def create_until_killed(
    address: str, running: subprocess.Popen[bytes], numbers: range, *, kill_after: int
) -> set[str]:
    """Names of the exports whose creation was answered; the coordinator is killed at one of these answers."""
    answered: set[str] = set()

    async with connected(address) as channel:
        stub = export_pb2_grpc.ExportServiceStub(channel)

        async def create(number: int) -> None:
            try:
                export = await stub.CreateExport(creation(number))
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                return
            answered.add(export.name)
            if len(answered) == kill_after:
                running.kill()

        await asyncio.gather(*(create(number) for number in numbers))
    assert running.wait(60) == -9
    return answered


def not_begun(place: str) -> set[str]:
    """Names of the exports that are stored and were not begun."""
    engine = sa.create_engine(f"sqlite:///{place}")
    with engine.connect() as connection:
        missing = set(connection.execute(sa.text("SELECT name FROM slipway_exports WHERE state = 'queued'")).scalars())
    engine.dispose()
    return missing


async def carry_out(address: str) -> tuple[Counter[str], dict[str, export_pb2.Export]]:
    """Be a worker until every export has ended: how often each was leased, and what became of it."""
    runs: Counter[str] = Counter()
    async with connected(address) as channel:
        workers, exports = worker_pb2_grpc.WorkerServiceStub(channel), export_pb2_grpc.ExportServiceStub(channel)
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            request = worker_pb2.SynchronizeRequest(
                worker_id="w", stages=["merge"], free_slots=8, max_wait=Duration(seconds=1)
            )
            for lease in (await workers.Synchronize(request)).leases:
                runs[lease.task.partition(":")[0]] += 1
                output = worker_pb2.TaskOutput(outputs={"pytorch": DIGEST})
                await workers.CompleteTask(
                    worker_pb2.CompleteTaskRequest(
                        worker_id="w", task=lease.task, lease_epoch=lease.lease_epoch, output=output
                    )
                )
            page = await exports.ListExports(export_pb2.ListExportsRequest(parent="projects/default", page_size=1000))
            found = {export.name: export for export in page.exports}
            if all(state(export) in {"succeeded", "failed", "cancelled"} for export in found.values()):
                # What was created is there once, whoever asks for it again.
                again = [await exports.CreateExport(creation(int(name.rpartition("e")[2]))) for name in sorted(found)]
                assert [export.name for export in again] == sorted(found)
                return runs, found
    raise AssertionError(f"not all exports ended; leased were {runs}")


@pytest.mark.slow
def test_what_was_answered_is_carried_out_once(tmp_path: Path) -> None:
    generator, place = random.Random(1), str(tmp_path / "state.db")
    address = f"127.0.0.1:{free_port()}"
    answered: set[str] = set()
    waiting: set[str] = set()
    for first in range(0, ROUNDS * EXPORTS, EXPORTS):
        with coordinator(tmp_path, place, address) as running:
            numbers = range(first, first + EXPORTS)
            killed = create_until_killed(address, running, numbers, kill_after=generator.randint(5, 50))
            answered |= asyncio.run(killed)
        waiting = not_begun(place)
        # On a busy machine the kill may come when all that was answered has begun.
        if waiting & answered:
            break
    assert waiting & answered, "none was in the gap that this is about"
    with ExitStack() as stack:
        running = stack.enter_context(coordinator(tmp_path, place, address))
        asyncio.run(answers(address))
        time.sleep(generator.uniform(0, 0.05))
        running.kill()  # and once more while it begins them
        running.wait()
        stack.enter_context(coordinator(tmp_path, place, address))
        runs, found = asyncio.run(carry_out(address))
    log = (tmp_path / "coordinator.log").read_text()
    assert answered <= found.keys(), log
    assert {state(export) for export in found.values()} == {"succeeded"}, log
    assert runs == dict.fromkeys(found, 1), log
    assert not_begun(place) == set()
    assert [len(task.attempts) for export in found.values() for task in export.tasks] == [1] * len(found)
    print(f"{len(answered)} answered, {len(waiting)} of {len(found)} stored had not begun")


async def answers(address: str) -> None:
    """Wait until a coordinator takes calls."""
    async with connected(address):
        pass
