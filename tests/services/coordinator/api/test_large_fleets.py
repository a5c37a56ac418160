"""What a coordinator says about many workers and tasks takes its event loop little time: all calls and leases share that loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from slipway.registry import IMPORT, stage_names
from slipway.security.access.principals import ALL_PROJECTS, Principal, Role
from slipway.security.interceptor import current_principal
from slipway.stage_call import StageCall
from slipway_coordinator.api.coordinator_service import CoordinatorService
from slipway_coordinator.broker.board import Board
from slipway_coordinator.lifecycle.offers import Offer, WorkerReport
from slipway_protos.v1 import coordinator_pb2 as pb

MOST_SECONDS = 0.015
"""Processor time of the event loop's own thread, which other programs on the machine do not change."""


@pytest.fixture
def board() -> Board:
    return Board(ttl=10.0, clock=lambda: 100.0)


@pytest.fixture
def service(board: Board) -> Iterator[CoordinatorService]:
    operator = Principal("admin", frozenset({Role.OPERATOR}), frozenset({ALL_PROJECTS}))
    token = current_principal.set(operator)
    coordinator: Any = SimpleNamespace(broker=SimpleNamespace(board=board))
    yield CoordinatorService(coordinator)
    current_principal.reset(token)


async def loop_time(call: Callable[[], Awaitable[Any]]) -> tuple[Any, float]:
    """Return the response of a call, and the processor time it took the event loop."""
    before = time.thread_time()
    response = await call()
    return response, time.thread_time() - before


async def test_formats_are_compared_with_many_workers_elsewhere(board: Board, service: CoordinatorService) -> None:
    context: Any = None
    await service.ListFormats(pb.ListFormatsRequest(), context)  # which imports what plans them
    for number in range(1000):
        stages = frozenset(stage_names())
        parameters = {stage: frozenset({"old"}) for stage in stages}
        board.record_report(WorkerReport(f"w{number}", stages, memory_bytes=1 << 34, parameters=parameters))
    response, seconds = await loop_time(lambda: service.ListFormats(pb.ListFormatsRequest(), context))
    assert not {each.name: each for each in response.formats}["gguf"].available
    assert seconds < MOST_SECONDS


async def test_a_long_queue_is_looked_at_elsewhere(board: Board, service: CoordinatorService) -> None:
    context: Any = None
    board.record_report(WorkerReport("a", frozenset({IMPORT})))
    for number in range(20_000):
        sources = {"base": f"s3://models/{number % 10}"}
        board.offer(
            Offer(f"projects/p{number % 50}/exports/x", f"t{number}", 1, StageCall(IMPORT, {"imports": sources}, {}))
        )
    first = board.waiting.first("a", board.ready(), projects=["p0"])
    assert first is not None
    board.hold(first.key, "a", epoch=1, offer=board.withdraw(first.key))
    response, seconds = await loop_time(lambda: service.ListWorkers(pb.ListWorkersRequest(), context))
    assert sum(group.count for group in response.queue) == 20_000 - 1
    assert {group.reason for group in response.queue} == {pb.WAIT_REASON_NO_ROOM, pb.WAIT_REASON_IMPORTING}
    assert seconds < MOST_SECONDS
