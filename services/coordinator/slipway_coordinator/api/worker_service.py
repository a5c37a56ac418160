"""``slipway.v1.WorkerService``: workers get tasks and report results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta

import grpc

from slipway.planning.attempt_keys import AttemptKey
from slipway.rpc.serving import LONGEST_POLL_SECONDS, unary
from slipway.security.access.principals import OWNER
from slipway.security.interceptor import current_principal
from slipway_coordinator.api.fields import invalid
from slipway_coordinator.api.messages import lease_message
from slipway_coordinator.api.reports import completion, lines_of, progress_of, worker_report
from slipway_coordinator.coordinator import Coordinator
from slipway_coordinator.model.offers import Held
from slipway_coordinator.model.records import TaskRecord
from slipway_protos.v1 import export_pb2, worker_pb2, worker_pb2_grpc

_MOST = 99  # together with a principal's name it must fit the database column
_WORKER_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{_MOST}}}")


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The broker of one coordinator, on the wire."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @unary
    async def Synchronize(
        self, request: worker_pb2.SynchronizeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SynchronizeResponse:
        """Take a worker's report; return leases and cancellations."""
        report = worker_report(_worker(request.worker_id), request)
        broker = self._coordinator.broker
        wait = min(request.max_wait.seconds + request.max_wait.nanos / 1e9, LONGEST_POLL_SECONDS)
        answer = await broker.synchronize(
            report, wait_seconds=wait, on_renewed=lambda: self._pass_on(report.worker, request)
        )
        return worker_pb2.SynchronizeResponse(
            lease_ttl=timedelta(seconds=broker.ttl),
            cancel_tasks=answer.cancel,
            leases=[lease_message(granted) for granted in answer.granted],
        )

    @unary
    async def CompleteTask(
        self, request: worker_pb2.CompleteTaskRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.CompleteTaskResponse:
        """Take a task's result. An invalid result ends the attempt too: the worker has no other."""
        worker, key = _worker(request.worker_id), AttemptKey.parse(request.task)
        held = Held(key, request.lease_epoch)
        event = completion(request, await self._planned(key))
        # Watchers of an export leave with its end, so its last lines go before, unless the lease is known only afterwards.
        known = self._coordinator.broker.holds(worker, held)
        if known:
            await self._publish_lines(key, request.logs)
        await self._coordinator.broker.complete(worker, held, event)
        if not known:
            await self._publish_lines(key, request.logs)
        if event.failure is not None and request.WhichOneof("outcome") == "output":
            raise event.failure.error()
        return worker_pb2.CompleteTaskResponse()

    async def _planned(self, key: AttemptKey) -> TaskRecord | None:
        record = await self._coordinator.load(key.export)
        return next((each for each in record.tasks if each.id == key.task), None) if record is not None else None

    async def _pass_on(self, worker: str, request: worker_pb2.SynchronizeRequest) -> None:
        """Publish progress and log lines of the tasks whose leases the worker holds to watchers."""
        for running in request.running:
            key = AttemptKey.parse(running.task)
            if not self._coordinator.broker.holds(worker, Held(key, running.lease_epoch)):
                continue
            if running.HasField("progress"):
                await self._coordinator.hub.publish(key.export, progress_of(key.task, key.attempt, running.progress))
            await self._publish_lines(key, running.logs)

    async def _publish_lines(self, key: AttemptKey, logs: Sequence[export_pb2.LogLine]) -> None:
        for line in lines_of(key.task, logs):
            await self._coordinator.hub.publish(key.export, line)


def _worker(worker_id: str) -> str:
    """Return a worker's full name: the principal proven by certificate or token, then the worker's own id.

    Leases are held under this name, so no worker can renew or complete the leases of another principal.
    """
    if not _WORKER_ID.fullmatch(worker_id):
        raise invalid("worker_id", worker_id, f"takes 1 to {_MOST} letters, digits, '.', '_', ':' and '-'")
    principal = current_principal.get()
    return worker_id if principal is OWNER else f"{principal.name}/{worker_id}"
