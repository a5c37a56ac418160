"""``slipway.v1.WorkerService``: workers get tasks and report results, which are checked before they are stored.

A worker runs on another machine and may be of another version. Its reports are checked against what its task can produce, so
that nothing else reaches the export's record, its watchers or the next decision.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from slipway.artifacts.digests import is_digest
from slipway.errors import Failure, ServiceError, StageError
from slipway.execution.memory_curve import MOST_SAMPLES, MemoryOverTime
from slipway.planning.references import AttemptKey
from slipway.rpc.messages import MOST_HELD
from slipway.rpc.serving import LONGEST_POLL_SECONDS, Context, unary
from slipway.rpc.values import dict_of, failure_of_status
from slipway.security.access.principals import OWNER
from slipway.security.interceptor import current_principal
from slipway.security.limits import limit_error
from slipway.stage import MOST_FACTS_BYTES
from slipway.texts import hidden_character, quoted, shortened
from slipway_coordinator.api.messages import lease_message
from slipway_coordinator.api.requests import field_error
from slipway_coordinator.coordinator import Coordinator
from slipway_coordinator.lifecycle.offers import Held, Offer, WorkerReport
from slipway_coordinator.lifecycle.records import TaskRecord
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_protos.v1 import export_pb2, worker_pb2, worker_pb2_grpc

_MOST = 99  # together with a principal's name it must fit the database column
_WORKER_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{_MOST}}}")

_MOST_RUNNING, _MOST_STAGES, _MOST_LIBRARIES, _MOST_LINES = 256, 64, 256, 1000
_MOST_PARAMETERS, _MOST_SLOTS, _MOST_GPUS = 256, 1 << 16, 1024
_LINE_LENGTH, _WORD_LENGTH = 5000, 200
_LARGEST = 2**62


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The broker of one coordinator, on the wire."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @unary
    async def Synchronize(
        self, request: worker_pb2.SynchronizeRequest, context: Context
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
        self, request: worker_pb2.CompleteTaskRequest, context: Context
    ) -> worker_pb2.CompleteTaskResponse:
        """Take a task's result. An invalid result ends the attempt too: the worker has no other."""
        worker, key = _worker(request.worker_id), AttemptKey.parse(request.task)
        held = Held(key, request.lease_epoch)
        event = completion(request, await self._expected(key))
        # Watchers leave when their export ends, so its last lines are published first, unless the lease becomes known only later.
        known = self._coordinator.broker.holds(worker, held)
        if known:
            await self._publish_lines(key, request.logs)
        await self._coordinator.broker.complete(worker, held, event)
        if not known:
            await self._publish_lines(key, request.logs)
        if event.failure is not None and request.WhichOneof("outcome") == "output":
            raise event.failure.error()
        return worker_pb2.CompleteTaskResponse()

    async def _expected(self, key: AttemptKey) -> Offer | TaskRecord | None:
        """Return what an attempt is to make: its offer, or the stored task where it is not offered (any more); None if it is not known."""
        offer = self._coordinator.broker.board.wanted_offer(key)
        if offer is not None:
            return offer
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
        raise field_error("worker_id", worker_id, f"takes 1 to {_MOST} letters, digits, '.', '_', ':' and '-'")
    principal = current_principal.get()
    return worker_id if principal is OWNER else f"{principal.name}/{worker_id}"


class _Facts(BaseModel):
    """Facts that decisions use; a stage may record others."""

    model_config = ConfigDict(strict=True, extra="allow")

    warnings: list[Annotated[str, StringConstraints(max_length=20_000)]] = Field(default=[], max_length=1000)
    targets: list[str] = Field(default=[], max_length=100)
    output_bytes: int = Field(default=0, ge=0, le=_LARGEST)
    model_bytes: int = Field(default=0, ge=0, le=_LARGEST)


def worker_report(worker: str, request: worker_pb2.SynchronizeRequest) -> WorkerReport:
    """Return a worker's report on itself, checked.

    Raises:
        ServiceError: reason ``REQUEST_INVALID`` or ``LIMIT_EXCEEDED``.
    """
    if not request.stages:
        raise ServiceError("stages are needed", reason="REQUEST_INVALID", about={"field": "stages"})
    can = request.capabilities
    _check_count("stages", request.stages, _MOST_STAGES)
    _check_count("running", request.running, _MOST_RUNNING)
    _check_count("capabilities.versions", can.versions, _MOST_LIBRARIES)
    _check_count("parameters", request.parameters, _MOST_STAGES)
    _check_count("held.artifacts", request.held.artifacts, MOST_HELD)
    for known in request.parameters.values():
        _check_count("parameters", known.names, _MOST_PARAMETERS)
        _check_words("parameters", known.names)
    _check_words("parameters", request.parameters)
    _check_words("stages", request.stages)
    _check_words("capabilities.gpu_architecture", [can.gpu_architecture])
    _check_words("capabilities.versions", [*can.versions, *can.versions.values()])
    return WorkerReport(
        worker=worker,
        stages=frozenset(request.stages),
        slots=min(max(request.slots, 0), _MOST_SLOTS),
        free_slots=request.free_slots,
        draining=request.draining,
        ending=request.ending,
        memory_bytes=_clamp(can.memory_bytes),
        gpu_architecture=can.gpu_architecture,
        gpu_memory_bytes=_clamp(can.gpu_memory_bytes),
        # A worker of an earlier version does not say how many there are.
        gpus=min(max(can.gpus, 1), _MOST_GPUS) if can.gpu_architecture else 0,
        processors=max(can.processors, 0),
        scratch_bytes=_clamp(can.scratch_bytes),
        libraries=dict(can.versions),
        parameters={stage: frozenset(known.names) for stage, known in request.parameters.items()},
        running=tuple(Held(AttemptKey.parse(running.task), running.lease_epoch) for running in request.running),
        only_task=AttemptKey.parse(request.only_task) if request.only_task else None,
        held=frozenset(request.held.artifacts) if request.HasField("held") else None,
    )


def progress_of(task: str, attempt: int, said: export_pb2.TaskProgress) -> export_pb2.TaskProgress:
    """Return an attempt's progress as watchers receive it."""
    return export_pb2.TaskProgress(
        task=task,
        attempt=attempt,
        phase=shortened(said.phase),
        done=_clamp(said.done),
        total=_clamp(said.total),
        unit=shortened(said.unit),
        memory_bytes=_clamp(said.memory_bytes),
    )


def lines_of(task: str, said: Iterable[export_pb2.LogLine]) -> list[export_pb2.LogLine]:
    """Return the last log lines of a report, each cut to the length that workers use."""
    return [
        export_pb2.LogLine(task=task, level=shortened(line.level), message=shortened(line.message, _LINE_LENGTH))
        for line in list(said)[-_MOST_LINES:]
    ]


def completion(request: worker_pb2.CompleteTaskRequest, task: Offer | TaskRecord | None) -> Event:
    """Return how an attempt ended; a result that cannot be the task's counts as a failure.

    Args:
        request: The worker's report.
        task: The attempt as offered, or the task as planned; None when it is not known any more.

    Raises:
        ServiceError: reason ``REQUEST_INVALID`` when the request has no outcome.
    """
    key = AttemptKey.parse(request.task)
    outcome = request.WhichOneof("outcome")
    if outcome is None:
        raise ServiceError("outcome is needed", reason="REQUEST_INVALID", about={"field": "outcome"})
    event = Event(
        kind=EventKind.CANCELLED,
        time=time.time(),
        task=key.task,
        attempt=key.attempt,
        peak_memory_bytes=0 if outcome == "cancelled" else _clamp(request.peak_memory_bytes),
        memory=_memory(request.memory),
    )
    if outcome == "cancelled":
        return event
    if outcome == "error":
        return event.model_copy(update={"kind": EventKind.FAILED, "failure": failure_of_status(request.error)})
    fault = _fault(request.output, task)
    if fault is not None:
        return event.model_copy(update={"kind": EventKind.FAILED, "failure": fault})
    changes = {
        "kind": EventKind.SUCCEEDED,
        "outputs": dict(sorted(request.output.outputs.items())),
        "facts": dict_of(request.output.facts),
        "reused": request.output.reused,
    }
    return event.model_copy(update=changes)


def _fault(said: worker_pb2.TaskOutput, task: Offer | TaskRecord | None) -> Failure | None:
    """Return why this cannot be the task's result; None if it can."""
    names = sorted(said.outputs)
    if task is not None and task.output and names != [task.output]:
        return _invalid_result(f"its outputs are {quoted(names)}, those of {task.stage} are {[task.output]}", "outputs")
    for name, digest in sorted(said.outputs.items()):
        if not is_digest(digest):
            return _invalid_result(f"output {quoted(name)} is {quoted(digest)}, which is no digest", "outputs")
    size = said.facts.ByteSize()
    if size > MOST_FACTS_BYTES:
        return _invalid_result(f"its facts have {size} bytes, {MOST_FACTS_BYTES} are allowed", "facts")
    try:
        _Facts.model_validate(dict_of(said.facts))
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in ("facts", *problem["loc"]))
        return _invalid_result(f"{place} is {quoted(problem['input'])}: {problem['msg']}", place)
    return None


def _invalid_result(what: str, field: str) -> Failure:
    return StageError(
        f"the worker handed in something that cannot be this task's result: {what}",
        reason="RESULT_INVALID",
        remedy="run workers of the coordinator's version",
        about={"field": field},
    ).failure()


def _check_count(field: str, items: Mapping[str, Any] | Any, most: int) -> None:
    if len(items) > most:
        raise limit_error(f"{field} has {len(items)} entries, {most} are allowed", field=field)


def _check_words(field: str, words: Iterable[str]) -> None:
    """Check names of stages and libraries, because they are shown, logged and used as metric labels."""
    for word in words:
        if len(word) > _WORD_LENGTH:
            raise limit_error(f"{field} has {quoted(word)}, {_WORD_LENGTH} characters are allowed", field=field)
        if hidden_character(word):
            raise ServiceError(
                f"{field} has {quoted(word)}, with the character {hidden_character(word)}",
                reason="REQUEST_INVALID",
                remedy="leave it out",
                about={"field": field},
            )


def _memory(said: export_pb2.MemoryOverTime) -> MemoryOverTime:
    """Return the memory that a worker reports over time; empty if the report is invalid."""
    seconds, samples = said.sample_seconds, said.samples_bytes
    if not 0 < seconds < _LARGEST or len(samples) > MOST_SAMPLES:  # not a number is not above 0 either
        return MemoryOverTime()
    return MemoryOverTime(seconds, tuple(map(_clamp, samples)))


def _clamp(number: int) -> int:
    """Clamp a number from a worker to the range that can be stored."""
    return min(max(number, 0), _LARGEST)
