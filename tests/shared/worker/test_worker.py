"""A worker's direct calls, slots and shares; leased tasks are covered by the coordinator's tests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from slipway.artifacts import LocalStore
from slipway.errors import ServiceError
from slipway.execution.runner import TaskResult, TaskRunner
from slipway.registry import IMPORT
from slipway.rpc.call_ends import STATUS_KEY
from slipway.rpc.serving import abort, listen
from slipway.rpc.values import dict_of, failure_of_status, struct_of
from slipway.security.server import ServerSecurity
from slipway.worker import service as worker_service
from slipway.worker.machine import Machine, Room, probe
from slipway.worker.main import gauges
from slipway.worker.pull import Worker, WorkerOptions
from slipway.worker.service import StageService
from slipway_protos.v1 import stage_pb2, stage_pb2_grpc, worker_pb2, worker_pb2_grpc

STAGE = "support.stages.watched:STAGE"


@asynccontextmanager
async def service(home: Path) -> AsyncIterator[tuple[stage_pb2_grpc.StageServiceStub, LocalStore]]:
    store = LocalStore(home / "store")
    machine = Machine(cores=2, memory_bytes=8 << 30, scratch_bytes=1 << 30)
    worker = Worker(WorkerOptions("", (STAGE, IMPORT), slots=1), TaskRunner(store, home / "scratch"), machine)
    server = grpc.aio.server(interceptors=[ServerSecurity(audits=True).interceptor()])
    stage_pb2_grpc.add_StageServiceServicer_to_server(StageService(worker), server)
    port = listen(server, "127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield stage_pb2_grpc.StageServiceStub(channel), store
    finally:
        await server.stop(0)


def story(home: Path, tell: Callable[[stage_pb2_grpc.StageServiceStub, LocalStore], Awaitable[None]]) -> None:
    async def main() -> None:
        async with service(home) as (stub, store):
            await tell(stub, store)

    asyncio.run(main())


def request(**params: object) -> stage_pb2.RunRequest:
    return stage_pb2.RunRequest(stage=STAGE, params=struct_of(params))


async def refused(call: AsyncIterator[stage_pb2.RunResponse]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    metadata = dict(caught.value.trailing_metadata())
    return caught.value.code(), failure_of_status(status_pb2.Status.FromString(metadata[STATUS_KEY])).reason


async def there_is_room(stub: stage_pb2_grpc.StageServiceStub) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            events = [event async for event in stub.Run(request(text="next"))]
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.05)
        else:
            assert events[-1].WhichOneof("event") == "output"
            return
    raise AssertionError("the worker stays busy")


def test_a_worker_describes_its_stages(tmp_path: Path) -> None:
    async def tell(stub: stage_pb2_grpc.StageServiceStub, _: LocalStore) -> None:
        described = await stub.Describe(stage_pb2.DescribeRequest())
        (stage,) = described.stages
        assert (stage.name, list(stage.outputs), stage.more_inputs) == (STAGE, ["out"], True)
        assert "sleep_seconds" in dict_of(stage.params_json_schema)["properties"]
        assert described.capabilities.memory_bytes > 1 << 30

    story(tmp_path, tell)


def test_a_direct_call_streams_events_and_ends_with_the_output(tmp_path: Path) -> None:
    async def tell(stub: stage_pb2_grpc.StageServiceStub, store: LocalStore) -> None:
        events = [event async for event in stub.Run(request(text="direct", sleep_seconds=0.2))]
        assert events[-1].WhichOneof("event") == "output"
        assert any(event.progress.phase == "sleeping" for event in events)
        assert any("run 1 of direct" in event.log.message for event in events)
        assert store.exists(events[-1].output.outputs["out"])
        again = [event async for event in stub.Run(request(text="direct", sleep_seconds=0.2))]
        assert again[-1].output.reused

    story(tmp_path, tell)


def test_a_slow_reader_misses_events_instead_of_filling_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_service, "_MOST_EVENTS", 20)

    async def main() -> None:
        machine = Machine(cores=2, memory_bytes=8 << 30, scratch_bytes=1 << 30)
        runner = TaskRunner(LocalStore(tmp_path / "store"), tmp_path / "scratch")
        worker = Worker(WorkerOptions("", (STAGE,), slots=1), runner, machine)
        ended = asyncio.Event()

        async def run(*given: Any, **more: Any) -> TaskResult:
            result = await TaskRunner.run(runner, *given, **more)
            ended.set()
            return result

        monkeypatch.setattr(runner, "run", run)  # only to learn when it has ended
        context: Any = None
        events = StageService(worker).Run(request(text="much", printed_lines=100), context)
        received = [await anext(events)]
        await ended.wait()
        received += [event async for event in events]
        assert received[-1].WhichOneof("event") == "output"
        assert len(received) <= 22
        assert received[-2].progress.phase == "storing out", "the newest are kept"

    asyncio.run(main())


def test_a_stage_that_fails_ends_the_stream_with_its_error(tmp_path: Path) -> None:
    async def tell(stub: stage_pb2_grpc.StageServiceStub, _: LocalStore) -> None:
        events = [event async for event in stub.Run(request(text="bad", fail="ONNX_INVALID"))]
        assert failure_of_status(events[-1].error).reason == "ONNX_INVALID"

    story(tmp_path, tell)


def test_a_busy_worker_and_wrong_calls_are_refused(tmp_path: Path) -> None:
    async def tell(stub: stage_pb2_grpc.StageServiceStub, _: LocalStore) -> None:
        running = stub.Run(request(text="long", sleep_seconds=30))
        await running.read()
        assert await refused(stub.Run(request())) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WORKER_BUSY")
        running.cancel()
        for other in ("other", IMPORT):
            unknown = stub.Run(stage_pb2.RunRequest(stage=other))
            assert await refused(unknown) == (grpc.StatusCode.INVALID_ARGUMENT, "STAGE_UNKNOWN")
        assert await refused(stub.Run(request(nonesuch=1))) == (grpc.StatusCode.INVALID_ARGUMENT, "PARAMS_INVALID")
        await there_is_room(stub)  # cancelling the call ended its task

    story(tmp_path, tell)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_direct_runs_are_in_the_audit_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="slipway.audit")

    def outcomes() -> list[str]:
        facts = [record.__dict__["audit"] for record in caplog.records if record.name == "slipway.audit"]
        assert {(one["action"], one["principal"], one["project"]) for one in facts} <= {("Run", "owner", "")}
        assert {one["resource"] for one in facts} <= {f"stages/{STAGE}", "stages/other"}
        return [one["outcome"] for one in facts]

    async def tell(stub: stage_pb2_grpc.StageServiceStub, _: LocalStore) -> None:
        for text, fail, expected in (("good", "", "done"), ("bad", "ONNX_INVALID", "ONNX_INVALID")):
            assert [event async for event in stub.Run(request(text=text, fail=fail))]
            assert outcomes()[-2:] == ["started", expected]
        await refused(stub.Run(stage_pb2.RunRequest(stage="other")))
        running = stub.Run(request(text="long", sleep_seconds=30))
        await running.read()
        running.cancel()
        await there_is_room(stub)

    story(tmp_path, tell)
    rest = [outcome for outcome in outcomes()[4:] if outcome != "WORKER_BUSY"]
    assert rest[:2] == ["STAGE_UNKNOWN", "started"]
    assert sorted(rest[2:]) == ["CANCELLED", "done", "started"]


def test_cores_are_shared_among_what_starts_together(tmp_path: Path) -> None:
    machine = Machine(cores=4, memory_bytes=10 << 30, scratch_bytes=0)
    worker = Worker(WorkerOptions("", ("x",), slots=3), TaskRunner(LocalStore(tmp_path), tmp_path / "scratch"), machine)
    assert worker._threads(1) == 4
    assert worker._threads(2) == 2
    with worker.slot():
        assert worker.free_slots == 2
    assert machine.capabilities(slots=2).memory_bytes == 4 << 30
    assert Machine(cores=1, memory_bytes=0, scratch_bytes=0).default_slots() == 1
    assert Machine(cores=8, memory_bytes=0, scratch_bytes=0, gpu_architecture="sm90").default_slots() == 1


def test_this_machine_is_known(tmp_path: Path) -> None:
    machine = probe(tmp_path)
    assert machine.cores >= 1
    assert machine.memory_bytes > 0
    assert isinstance(machine.capabilities(slots=1), worker_pb2.Capabilities)


def test_room_is_looked_at_again_and_said_once(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    room = Room(small_disk)
    assert (room.look(), room.enough) == (False, True)
    assert room.free_bytes() > 7 << 20
    filler = small_disk / "filler"
    filler.write_bytes(bytes(int(7.7 * (1 << 20))))
    assert (room.look(), room.enough) == (True, False)
    assert (room.look(), room.enough) == (False, False)
    filler.unlink()
    assert (room.look(), room.enough) == (True, True)
    said = [record.message for record in caplog.records]
    assert [message.partition(":")[0] for message in said] == [
        "takes no tasks until there is room",
        "takes tasks again",
    ]
    assert str(small_disk) in said[0]
    assert "of 8.4 MB are left" in said[0]


async def test_every_new_reason_for_a_refusal_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A coordinator that was away may refuse the worker once it is back, after its token was exchanged, say."""
    reasons = ["COORDINATOR_UNAVAILABLE", "COORDINATOR_UNAVAILABLE", "UNAUTHENTICATED", ""]
    answers, served = iter(reasons), asyncio.Event()

    async def synchronize(request: worker_pb2.SynchronizeRequest, context: Any) -> worker_pb2.SynchronizeResponse:
        if reason := next(answers, ""):
            await abort(context, ServiceError(f"it is {reason}", reason=reason).failure())
        served.set()
        await asyncio.sleep(request.max_wait.ToTimedelta().total_seconds())
        return worker_pb2.SynchronizeResponse()

    server, servicer = grpc.aio.server(), worker_pb2_grpc.WorkerServiceServicer()
    servicer.Synchronize = synchronize  # type: ignore[method-assign]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = listen(server, "127.0.0.1:0")
    await server.start()
    options = WorkerOptions(f"127.0.0.1:{port}", (STAGE,))
    worker = Worker(options, TaskRunner(LocalStore(tmp_path / "store"), tmp_path / "scratch"), probe(tmp_path))
    with caplog.at_level(logging.WARNING, logger="slipway.worker"):
        running = asyncio.create_task(worker.run())
        try:
            await asyncio.wait_for(served.wait(), 60)
        finally:
            worker.stop()
            await running
            await server.stop(None)
    said = [record.message for record in caplog.records if "it is" in record.message]
    assert said == ["it is COORDINATOR_UNAVAILABLE", "it is UNAUTHENTICATED"]


@pytest.mark.parametrize("waits", [True, False])
def test_a_worker_without_room_says_so_and_asks_again_when_there_is_some(
    small_disk: Path, tmp_path: Path, *, waits: bool
) -> None:
    """Alone it takes tasks all the same, which say what is wrong."""
    filler = small_disk / "filler"
    filler.write_bytes(bytes(int(7.7 * (1 << 20))))

    async def main() -> None:
        heard: list[bool] = []

        async def synchronize(
            request: worker_pb2.SynchronizeRequest, context: grpc.aio.ServicerContext
        ) -> worker_pb2.SynchronizeResponse:
            del context
            heard.append(request.draining)
            await asyncio.sleep(request.max_wait.ToTimedelta().total_seconds())
            return worker_pb2.SynchronizeResponse()

        async def until(expected: list[bool]) -> None:
            async with asyncio.timeout(60):
                while heard != expected:
                    await asyncio.sleep(0.05)

        server = grpc.aio.server()
        servicer = worker_pb2_grpc.WorkerServiceServicer()
        servicer.Synchronize = synchronize  # type: ignore[method-assign]
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
        port = listen(server, "127.0.0.1:0")
        await server.start()
        options = WorkerOptions(f"127.0.0.1:{port}", (STAGE,), waits_for_room=waits)
        worker = Worker(options, TaskRunner(LocalStore(tmp_path), small_disk), probe(small_disk))
        running = asyncio.create_task(worker.run())
        try:
            await until([waits])
            sampled = {metric.name: value for metric, _, value in gauges(worker)}
            assert sampled["slipway_worker_without_room"] == waits
            assert sampled["slipway_worker_scratch_free_bytes"] < 1 << 20
            filler.unlink()
            await until([True, False] if waits else [False])
        finally:
            worker.stop()
            await running
            await server.stop(0)

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(4))
def test_a_cancellation_in_the_moment_of_a_change_is_not_lost(tmp_path: Path, steps: int) -> None:
    """As in a stop: the event is set, and the loop is cancelled some steps later. It would go on for ever otherwise."""

    async def ended() -> bool:
        options = WorkerOptions("", ("x",), slots=1, report_seconds=60.0)
        worker = Worker(options, TaskRunner(LocalStore(tmp_path), tmp_path / "scratch"), probe(tmp_path))

        async def pulling() -> None:
            while True:
                worker._changed.clear()
                await worker._pause()

        task = asyncio.create_task(pulling())
        await asyncio.sleep(0.01)
        worker.stop()
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=2)
        task.cancel()
        return bool(done)

    assert asyncio.run(ended())
