"""``slipway.v1.WorkerService``: how workers get tasks and hand in results."""

from __future__ import annotations

import re
import time

import grpc

from slipway.artifacts.digests import is_digest
from slipway.errors import ServiceError
from slipway.rpc import LONGEST_POLL_SECONDS, unary
from slipway.security.interceptor import current_principal
from slipway.security.principals import OWNER
from slipway.wire import dict_of, failure_of_status
from slipway_coordinator.coordinator import Coordinator
from slipway_coordinator.graph import Event, EventKind
from slipway_coordinator.messages import duration, lease_message
from slipway_coordinator.offers import Held, WorkerReport
from slipway_protos.v1 import worker_pb2, worker_pb2_grpc

_MOST = 99  # with a principal's name, a column's width
_WORKER_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{_MOST}}}")


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The broker of one coordinator, on the wire."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @unary
    async def Synchronize(  # noqa: N802 - the RPC's name
        self,
        request: worker_pb2.SynchronizeRequest,
        context: grpc.aio.ServicerContext,  # noqa: ARG002
    ) -> worker_pb2.SynchronizeResponse:
        """Reports in, leases and cancellations out."""
        report = _report(request)
        broker = self._coordinator.broker
        await self._pass_on(report.worker, request)
        wait = min(request.max_wait.seconds + request.max_wait.nanos / 1e9, LONGEST_POLL_SECONDS)
        answer = await broker.synchronize(report, wait_seconds=wait)
        return worker_pb2.SynchronizeResponse(
            lease_ttl=duration(broker.ttl),
            cancel_tasks=answer.cancel,
            leases=[lease_message(granted) for granted in answer.granted],
        )

    @unary
    async def CompleteTask(  # noqa: N802
        self,
        request: worker_pb2.CompleteTaskRequest,
        context: grpc.aio.ServicerContext,  # noqa: ARG002
    ) -> worker_pb2.CompleteTaskResponse:
        """A result in."""
        worker, held = _worker(request.worker_id), Held(request.task, request.lease_epoch)
        export, task, _ = _parts(request.task)
        if not self._coordinator.broker.is_of_another(worker, request.task):
            for line in request.logs:
                line.task = task
                await self._coordinator.hub.publish(export, line)
        await self._coordinator.broker.complete(worker, held, _event(request))
        return worker_pb2.CompleteTaskResponse()

    async def _pass_on(self, worker: str, request: worker_pb2.SynchronizeRequest) -> None:
        """Progress and log lines to those who watch, of tasks that are not another's."""
        for running in request.running:
            export, task, attempt = _parts(running.task)
            if self._coordinator.broker.is_of_another(worker, running.task):
                continue
            if running.HasField("progress"):
                running.progress.task, running.progress.attempt = task, attempt
                await self._coordinator.hub.publish(export, running.progress)
            for line in running.logs:
                line.task = task
                await self._coordinator.hub.publish(export, line)


def _report(request: worker_pb2.SynchronizeRequest) -> WorkerReport:
    if not request.stages:
        raise ServiceError("stages are needed", reason="REQUEST_INVALID")
    return WorkerReport(
        worker=_worker(request.worker_id),
        stages=frozenset(request.stages),
        free_slots=request.free_slots,
        draining=request.draining,
        ending=request.ending,
        memory_bytes=request.capabilities.memory_bytes,
        gpu_architecture=request.capabilities.gpu_architecture,
        gpu_memory_bytes=request.capabilities.gpu_memory_bytes,
        libraries=dict(request.capabilities.versions),
        parameters={stage: frozenset(known.names) for stage, known in request.parameters.items()},
        running=tuple(Held(running.task, running.lease_epoch) for running in request.running),
    )


def _worker(worker_id: str) -> str:
    """A worker's full name: who it proved to be by its certificate or token, then what it calls itself.

    Leases are held under this name, so that nobody renews or completes those of another identity, whatever it says.
    """
    if not _WORKER_ID.fullmatch(worker_id):
        raise ServiceError(
            f"worker_id is {worker_id[:_MOST]!r}",
            reason="REQUEST_INVALID",
            remedy=f"it takes 1 to {_MOST} letters, digits, '.', '_', ':' and '-'",
            about={"field": "worker_id"},
        )
    principal = current_principal.get()
    return worker_id if principal is OWNER else f"{principal.name}/{worker_id}"


def _event(request: worker_pb2.CompleteTaskRequest) -> Event:
    _, task, attempt = _parts(request.task)
    peak = request.peak_memory_bytes
    match request.WhichOneof("outcome"):
        case "output":
            for name, digest in request.output.outputs.items():
                if not is_digest(digest):
                    raise ServiceError(
                        f"output {name[:_MOST]!r} is {digest[:_MOST]!r}",
                        reason="REQUEST_INVALID",
                        remedy="it is an artifact's digest",
                        about={"field": "output.outputs"},
                    )
            return Event(
                kind=EventKind.SUCCEEDED,
                time=time.time(),
                task=task,
                attempt=attempt,
                outputs=dict(sorted(request.output.outputs.items())),
                facts=dict_of(request.output.facts),
                reused=request.output.reused,
                peak_memory_bytes=peak,
            )
        case "error":
            failure = failure_of_status(request.error)
            kind, when = EventKind.FAILED, time.time()
            return Event(kind=kind, time=when, task=task, attempt=attempt, failure=failure, peak_memory_bytes=peak)
        case "cancelled":
            return Event(kind=EventKind.CANCELLED, time=time.time(), task=task, attempt=attempt)
        case _:
            raise ServiceError("outcome is needed", reason="REQUEST_INVALID")


def _parts(key: str) -> tuple[str, str, int]:
    """Export, task and attempt of ``{export}:{task}:{attempt}``."""
    export, _, rest = key.partition(":")
    task, _, attempt = rest.rpartition(":")
    if not export or not task or not attempt.isdigit():
        raise ServiceError(f"task is {key!r}", reason="REQUEST_INVALID", remedy="it is like EXPORT:TASK:ATTEMPT")
    return export, task, int(attempt)
