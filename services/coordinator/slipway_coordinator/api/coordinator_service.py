"""``slipway.v1.CoordinatorService``: the formats that the coordinator knows, its workers, what waits for them, and projects."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, cast

from google.protobuf.message import Message

from slipway.errors import Failure, ServiceError
from slipway.planning.judging import validation_obstacle
from slipway.requirements import Abilities, Lack, Placement
from slipway.rpc.formats import describe_formats
from slipway.rpc.serving import Context, unary
from slipway.rpc.values import status_of, timestamp
from slipway.security.access.principals import ALL_PROJECTS, OPERATORS, Principal
from slipway.security.interceptor import current_principal
from slipway_coordinator.api.messages import project_message
from slipway_coordinator.api.requests import ITEM_BYTES, PAGE_BYTES, field_error, page_size
from slipway_coordinator.broker.overview import Queue, SeenWorker, Sight, WaitingGroup, WaitReason, seen_workers
from slipway_coordinator.broker.workers import KnownWorker
from slipway_coordinator.coordinator import Coordinator
from slipway_coordinator.storage.filters import page_start, page_token
from slipway_protos.v1 import coordinator_pb2 as pb
from slipway_protos.v1 import coordinator_pb2_grpc

M = TypeVar("M", bound=Message)

_FORMATS, _MOST_FORMATS = 50, 100
_WORKERS, _MOST_WORKERS = 100, 1000
_PROJECTS, _MOST_PROJECTS = 100, 1000
_REMEDIES: Mapping[Lack, str] = {
    Lack.STAGE: "start a worker that runs the stage {stage}: slipway worker --stage {stage}",
    Lack.ABILITY: "start a worker of the stage {stage} on a machine that has what is needed",
    Lack.VERSION: "upgrade the workers of the stage {stage} to the coordinator's version",
    Lack.READINESS: "wait until they take tasks again, or start another worker of the stage {stage}",
}


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Formats, workers and projects of one coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @unary
    async def ListFormats(self, request: pb.ListFormatsRequest, context: Context) -> pb.ListFormatsResponse:
        """Return a page of formats, with what live workers can make."""
        size = page_size(request.page_size, default=_FORMATS, most=_MOST_FORMATS)
        start = page_start(request.page_token, query=("formats",))
        described = await asyncio.to_thread(describe_formats)
        names = [each.name for each in described]
        if start is not None and start[1] not in names:
            raise field_error("page_token", request.page_token, "is of formats that are installed no more: begin again")
        first = 0 if start is None else names.index(start[1]) + 1
        board = self._coordinator.broker.board
        known = [worker.abilities for worker in board.workers.values()]
        judge = _Judge([*board.ready().values()], known, engine=board.engine)
        page, obstacle = await asyncio.to_thread(
            lambda: (_page((each.judged(judge) for each in described[first:]), size=size), validation_obstacle(judge))
        )
        last = first + len(page)
        token = page_token((0.0, names[last - 1]), query=("formats",)) if last < len(names) else ""
        return pb.ListFormatsResponse(
            formats=page, next_page_token=token, validation_obstacle=None if obstacle is None else status_of(obstacle)
        )

    @unary
    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        """Return a page of workers, and with the first one the queue."""
        size = page_size(request.page_size, default=_WORKERS, most=_MOST_WORKERS)
        principal = current_principal.get()
        query = ("workers", principal.name)
        after = page_start(request.page_token, query=query)
        board, sight = self._coordinator.broker.board, _sight(principal)
        workers, hidden = seen_workers(board, sight)
        workers.sort(key=_place)
        left = [worker for worker in workers if after is None or _place(worker) > after]
        page = _page(map(_worker_message, left), size=size)
        token = page_token(_place(left[len(page) - 1]), query=query) if len(page) < len(left) else ""
        response = pb.ListWorkersResponse(workers=page, next_page_token=token, hidden_workers=hidden)
        if after is None:
            queue = Queue.of(board, now=time.time())
            groups = await asyncio.to_thread(queue.groups, sight)
            response.queue.extend(map(_group_message, groups))
        return response

    @unary
    async def ListProjects(self, request: pb.ListProjectsRequest, context: Context) -> pb.ListProjectsResponse:
        """Return a page of projects with their limits and what they use."""
        size = page_size(request.page_size, default=_PROJECTS, most=_MOST_PROJECTS)
        principal, limits = current_principal.get(), self._coordinator.projects()
        query = ("projects", principal.name)
        start = page_start(request.page_token, query=query)
        database = self._coordinator.database
        after, names = "" if start is None else start[1], set(principal.projects)
        if ALL_PROJECTS in names:
            names = {*limits.names, *await self._coordinator.call(database.find_projects)}
        left = sorted(name for name in names if name > after)[: size + 1]  # one more, if there is a next page
        usage = await self._coordinator.call(lambda: database.usage_of(left))
        unended = self._coordinator.admission.count_unended
        page = _page(
            (project_message(name, limits.limits(name), usage[name], unended=unended(name)) for name in left),
            size=size,
        )
        token = page_token((0.0, left[len(page) - 1]), query=query) if len(page) < len(left) else ""
        return pb.ListProjectsResponse(projects=page, next_page_token=token)


def _sight(principal: Principal) -> Sight:
    """Return what a caller may see: operators of all projects everything, others what their projects show."""
    everything = ALL_PROJECTS in principal.projects and bool(principal.roles & OPERATORS)
    return Sight(everything, principal.may_see)


class _Judge:
    """Says why no live worker takes a task; each kind of task is compared with the workers once.

    Args:
        ready: Abilities of the workers that take tasks.
        known: Abilities of all live workers.
        engine: Name of the engine that starts a worker for each task; empty if workers pull. What its nodes lack is not known before.
    """

    def __init__(self, ready: Sequence[Abilities], known: Sequence[Abilities], *, engine: str) -> None:
        self._ready, self._known, self._engine = ready, known, engine
        self._judged: dict[Placement, Failure | None] = {}

    def __call__(self, task: Placement) -> Failure | None:
        if task not in self._judged:
            self._judged[task] = self._obstacle(task)
        return self._judged[task]

    def _obstacle(self, task: Placement) -> Failure | None:
        if self._engine or any(task.can(worker) for worker in self._ready):
            return None
        lack, text = task.lack(self._known)
        remedy = _REMEDIES[lack].format(stage=task.stage)
        return ServiceError(text, reason=lack.value, remedy=remedy, about={"stage": task.stage}).failure()


def _page(messages: Iterable[M], *, size: int) -> list[M]:
    """Return as many messages as were asked for and as fit into a response, at least one if there are any."""
    page, room = list[M](), PAGE_BYTES
    for message in messages:
        room -= message.ByteSize() + ITEM_BYTES
        if page and (len(page) == size or room < 0):
            break
        page.append(message)
    return page


def _place(worker: SeenWorker) -> tuple[float, str]:
    """Return a worker's place in the list, which does not change while it is known. A name may be longer than a token."""
    return worker.known.joined, hashlib.sha256(worker.known.report.worker.encode()).hexdigest()[:32]


def _worker_message(worker: SeenWorker) -> pb.Worker:
    report = worker.known.report
    return pb.Worker(
        name=report.worker,
        state=_state(worker.known),
        stages=sorted(report.stages),
        slots=report.slots or len(report.running) + max(report.free_slots, 0),
        running_tasks=len(worker.running),
        tasks=[
            pb.WorkerTask(export=one.key.export, task=one.key.task, attempt=one.key.attempt, stage=one.stage)
            for one in worker.running
        ],
        machine=pb.WorkerMachine(
            task_memory_bytes=report.memory_bytes,
            processors=report.processors,
            gpu_architecture=report.gpu_architecture,
            gpu_memory_bytes=report.gpu_memory_bytes,
            scratch_bytes=report.scratch_bytes,
        ),
        join_time=timestamp(worker.known.joined),
        report_time=timestamp(worker.known.reported),
    )


def _state(known: KnownWorker) -> pb.WorkerState:
    if known.ending:
        return pb.WORKER_STATE_ENDING
    return pb.WORKER_STATE_DRAINING if known.draining else pb.WORKER_STATE_ACTIVE


def _group_message(group: WaitingGroup) -> pb.WaitingTasks:
    return pb.WaitingTasks(
        stage=group.stage,
        project=group.project,
        count=group.count,
        oldest_age_seconds=round(group.age, 3),
        reason=_wait_reason(group.reason),
        detail=group.detail,
    )


def _wait_reason(reason: WaitReason) -> pb.WaitReason:
    return cast("pb.WaitReason", pb.WaitReason.Value(f"WAIT_REASON_{reason.value}"))
