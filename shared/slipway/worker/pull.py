"""The pull loop: one call at a time reports running tasks to the coordinator and returns tasks to start or end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import grpc

from slipway.contracts.engine import WORKER_SEPARATOR
from slipway.errors import Failure, ServiceError
from slipway.execution.runner import TaskRunner
from slipway.rpc.call_ends import failure_of_call
from slipway.security.channels import AsyncChannel
from slipway.settings.security import Security
from slipway.worker.holdings import Holdings
from slipway.worker.leased import LeasedTask
from slipway.worker.machine import LOOK_SECONDS, Machine, Room, known_parameters
from slipway_protos.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger("slipway.worker")

_IDLE_POLL_SECONDS = 30.0
_CALL_SLACK_SECONDS = 15.0
_LONGEST_BACKOFF_SECONDS = 5.0
_GOODBYE_SECONDS = 2.0
_LOOK_SECONDS = 1.0


def new_worker_id(submission: str = "") -> str:
    """Return a unique name; a restarted worker gets a new one, because its tasks are gone. That of an engine begins with its submission."""
    own = uuid.uuid4().hex[:8]
    return f"{submission}{WORKER_SEPARATOR}{own}" if submission else f"{socket.gethostname()}-{os.getpid()}-{own}"


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker.

    Attributes:
        coordinator: Address to pull from.
        stages: Names of the stages it takes.
        slots: Tasks at the same time.
        report_seconds: How often progress is reported while something runs.
        drain_seconds: How long running tasks may continue after :meth:`Worker.stop` before they are returned.
        security: Certificates and token for the coordinator; None for neither.
        waits_for_room: Take no tasks while the disk of the work folders is nearly full. If false, tasks start anyway and may
            fail with DISK_FULL.
        worker_id: Name; unique for every start of a worker.
        only_task: Key of the only attempt it takes, after which it stops; empty for any.
        patience_seconds: With ``only_task``: how long it waits for the attempt, and how long the coordinator may be silent while it runs
            it, before it gives up.
    """

    coordinator: str
    stages: tuple[str, ...]
    slots: int = 1
    report_seconds: float = 0.5
    drain_seconds: float = 0.0
    security: Security | None = None
    waits_for_room: bool = True
    worker_id: str = field(default_factory=new_worker_id)
    only_task: str = ""
    patience_seconds: tuple[float, float] = (120.0, 600.0)


class Worker:
    """Runs leased tasks until :meth:`stop`.

    Args:
        options: Its options.
        runner: Runs one task.
        machine: Its resources.

    Attributes:
        failure: Why it gave up with its only task; None otherwise.
    """

    def __init__(self, options: WorkerOptions, runner: TaskRunner, machine: Machine) -> None:
        self.options = options
        self.machine = machine
        self.runner = runner
        self.room = Room(runner.scratch)
        self._parameters = known_parameters(options.stages)
        self._holdings = Holdings(runner)
        self._running: dict[str, LeasedTask] = {}
        self._direct = 0
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._heard = time.monotonic()
        self._channel: AsyncChannel
        self.failure: Failure | None = None

    @property
    def free_slots(self) -> int:
        """Number of tasks that could start now."""
        return self.options.slots - len(self._running) - self._direct

    def running(self) -> list[tuple[str, int]]:
        """Return stage and resident memory in bytes of each running task. Safe from any thread."""
        tasks = list(self._running.values())
        return [(task.lease.stage, task.progress.memory_bytes if task.progress is not None else 0) for task in tasks]

    def stop(self) -> None:
        """Take no more tasks, and let :meth:`run` end."""
        self._stopping.set()
        self._changed.set()

    @contextlib.contextmanager
    def slot(self) -> Iterator[int]:
        """Occupy a slot for a task that was not leased; yield its number of threads."""
        threads = self._threads(1)
        self._direct += 1
        try:
            yield threads
        finally:
            self._direct -= 1
            self._changed.set()

    async def run(self) -> None:
        """Pull and run tasks until stopped; return once all children have ended and all tasks are handed in or returned."""
        async with AsyncChannel(self.options.coordinator, self.options.security) as self._channel:
            if self.options.waits_for_room:
                self.room.look()
            await asyncio.to_thread(self._holdings.look)
            looking = self._watch_room(), self._watch_silence(), self._holdings.keep_looking()
            background = [asyncio.create_task(work) for work in (self._pull(), *looking)]
            try:
                await self._stopping.wait()
                await self._drain()
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
            await self._say_goodbye()

    @property
    def _stub(self) -> worker_pb2_grpc.WorkerServiceStub:
        return worker_pb2_grpc.WorkerServiceStub(self._channel.current())

    def _failure(self, error: grpc.RpcError) -> Failure:
        identity = self._channel.identity
        return failure_of_call(error, address=self.options.coordinator, encrypted=identity.encrypted)

    async def _watch_room(self) -> None:
        while self.options.waits_for_room:
            await asyncio.sleep(LOOK_SECONDS)
            if self.room.look():
                self._changed.set()

    async def _watch_silence(self) -> None:
        """Stop a worker of one task that nobody waits for any more: its engine would keep a place for it for ever."""
        while self.options.only_task:
            await asyncio.sleep(_LOOK_SECONDS)
            limit = self.options.patience_seconds[bool(self._running)]
            if time.monotonic() - self._heard > limit:
                silent = (
                    "has been silent" if self._running else f"has not given {self.options.only_task} to this worker"
                )
                self.failure = ServiceError(
                    f"the coordinator at {self.options.coordinator} {silent} for {limit:g} s",
                    reason="COORDINATOR_UNAVAILABLE",
                    remedy="see that it runs, and that this node reaches its address",
                ).failure()
                self.stop()

    async def _pull(self) -> None:
        failures, told = 0, ""
        while True:
            self._changed.clear()
            request = self._request()
            try:
                response = await self._synchronize(request)
            except grpc.aio.AioRpcError as error:
                self._take_back(request)
                self._holdings.note_lost()
                failure = self._failure(error)
                if failure.reason != told:  # a coordinator that is back may refuse this worker
                    log.warning(str(failure))
                failures, told = failures + 1, failure.reason
                await asyncio.sleep(min(0.2 * 2 ** min(failures, 6), _LONGEST_BACKOFF_SECONDS))
                continue
            if failures:
                log.info("the coordinator answers again")
                failures, told = 0, ""
            if response is None:
                self._take_back(request)
                continue
            self._holdings.note_answered(request)
            if response.leases or self._running:
                self._heard = time.monotonic()
            if self.options.only_task in response.cancel_tasks and not self._running:
                log.info(f"{self.options.only_task} is not to be run any more")
                self.stop()
            self._start(list(response.leases))
            ending = [self._running[key].cancel() for key in response.cancel_tasks if key in self._running]
            if response.cancel_tasks and not any(ending):
                # All of these are ending already, and the coordinator responds at once while they are: do not call in a tight loop.
                await self._pause()

    async def _synchronize(self, request: worker_pb2.SynchronizeRequest) -> worker_pb2.SynchronizeResponse | None:
        """Make one call; return None if it was abandoned because something changed here that must be reported."""
        wait = request.max_wait.ToTimedelta().total_seconds()
        call = self._stub.Synchronize(
            request, timeout=wait + _CALL_SLACK_SECONDS, metadata=self._channel.identity.metadata()
        )
        answer = asyncio.ensure_future(_answer(call))
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({answer, changed}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return None
            return answer.result()
        finally:
            changed.cancel()
            if not answer.done():
                # A lease granted meanwhile is not lost: the coordinator sends it again, because we do not report it as running.
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)

    def _request(self) -> worker_pb2.SynchronizeRequest:
        return worker_pb2.SynchronizeRequest(
            worker_id=self.options.worker_id,
            stages=self.options.stages,
            capabilities=self.machine.capabilities(slots=self.options.slots),
            slots=self.options.slots,
            free_slots=max(self.free_slots, 0),
            draining=self._stopping.is_set() or not self.room.enough,
            ending=self._stopping.is_set(),
            max_wait=timedelta(seconds=self.options.report_seconds if self._running else _IDLE_POLL_SECONDS),
            running=[running.report() for running in self._running.values()],
            parameters=self._parameters,
            only_task=self.options.only_task,
            held=None if self.options.only_task else self._holdings.message(),
        )

    def _take_back(self, request: worker_pb2.SynchronizeRequest) -> None:
        """Keep the log lines of a report that did not arrive."""
        for reported in request.running:
            if reported.task in self._running:
                self._running[reported.task].take_back(reported.logs)

    def _start(self, leases: list[worker_pb2.TaskLease]) -> None:
        leases = [lease for lease in leases if lease.task not in self._running]
        memory_bytes = self.machine.capabilities(slots=self.options.slots).memory_bytes
        for index, lease in enumerate(leases):
            threads = lease.threads or self._threads(len(leases) - index)
            running = LeasedTask(lease, self.options.worker_id, threads=threads, memory_bytes=memory_bytes)
            self._running[lease.task] = running
            running.task = asyncio.create_task(self._run(running))

    def _threads(self, starting: int) -> int:
        """Return the threads for the first of ``starting`` tasks: an even share of the unused cores."""
        used = sum(running.threads for running in self._running.values())
        return max(1, (self.machine.cores - used) // starting)

    async def _run(self, running: LeasedTask) -> None:
        try:
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):  # the store is not writable, which the task itself will report
                    stack.enter_context(self.runner.using_store())
                await self._hand_in(await running.outcome(self.runner, on_phase=self._changed.set))
        finally:
            self._running.pop(running.lease.task, None)
            self._changed.set()
            if self.options.only_task:
                self.stop()

    async def _hand_in(self, request: worker_pb2.CompleteTaskRequest) -> None:
        """Hand in a result, retrying for as long as it takes; meanwhile the task is reported as running, so its lease stays."""
        attempt = 0
        while True:
            try:
                await self._stub.CompleteTask(
                    request, timeout=_CALL_SLACK_SECONDS, metadata=self._channel.identity.metadata()
                )
            except grpc.aio.AioRpcError as error:
                failure = self._failure(error)
                # A refused identity may be about to be renewed.
                if not failure.retryable and failure.reason not in {"UNAUTHENTICATED", "TLS_INVALID"}:
                    _log_refusal(request.task, failure)
                    return
                attempt += 1
                await asyncio.sleep(min(0.2 * 2 ** min(attempt, 6), _LONGEST_BACKOFF_SECONDS))
            else:
                return

    async def _pause(self) -> None:
        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes while the event is set, as in stop().
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.options.report_seconds):
                await self._changed.wait()

    async def _say_goodbye(self) -> None:
        """Tell the coordinator that this worker ends; if the call fails, it will notice the silence."""
        request = self._request()
        request.max_wait.Clear()
        try:
            await self._stub.Synchronize(request, timeout=_GOODBYE_SECONDS, metadata=self._channel.identity.metadata())
        except grpc.aio.AioRpcError as error:
            log.info(f"the coordinator could not be told that this worker ends: {error.code().name}")

    async def _drain(self) -> None:
        """Let running tasks finish for a while, then return them; give up if the coordinator does not answer."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self.options.drain_seconds)
        for running in list(self._running.values()):
            running.cancel()
        if late:
            # The executor needs up to three seconds to end a child that ignores SIGTERM.
            _, stuck = await asyncio.wait(late, timeout=4.0)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)


async def _answer(
    call: grpc.aio.UnaryUnaryCall[worker_pb2.SynchronizeRequest, worker_pb2.SynchronizeResponse],
) -> worker_pb2.SynchronizeResponse:
    return await call


def _log_refusal(task: str, failure: Failure) -> None:
    level = logging.INFO if failure.reason == "LEASE_LOST" else logging.ERROR
    log.log(level, f"the result of {task} was refused: {failure}")
