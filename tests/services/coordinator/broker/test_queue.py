"""A long queue: how much it takes, and who goes first."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from slipway.configuration import ExportConfiguration
from slipway.requirements import Abilities
from slipway.rpc.call_ends import STATUS_KEY
from slipway.stage_call import StageCall
from slipway_coordinator.broker.board import Board
from slipway_coordinator.broker.shares import Shares
from slipway_coordinator.broker.waiting import Waiting
from slipway_coordinator.lifecycle.offers import Offer
from slipway_protos.v1 import export_pb2
from support.coordinators.harness import DIGEST, Harness, state


def offer(export: str, *, project: str = "p", stage: str = "merge", priority: int = 0) -> Offer:
    return Offer(f"projects/{project}/exports/{export}", "m", 1, StageCall(stage, {}, {}), priority=priority)


def order(waiting: Waiting, *stages: str) -> list[str]:
    """Exports in the order in which one worker after another gets them, none of which ends."""
    running: Counter[str] = Counter()
    shares = Shares()
    taken = []
    known = {"w": Abilities(frozenset(stages or ("merge",)))}
    while (
        first := waiting.first("w", known, projects=shares.order(waiting.projects, running, lambda _: 1.0))
    ) is not None:
        waiting.remove(first.key)
        shares.charge(first.project, 1.0)
        running[first.project] += 1
        taken.append(first.export.rpartition("/")[2])
    return taken


def filled(*offers: Offer) -> Waiting:
    waiting = Waiting()
    for each in offers:
        waiting.add(each)
    return waiting


def test_the_oldest_goes_first() -> None:
    assert order(filled(*(offer(name) for name in "bca"))) == ["b", "c", "a"]


def test_the_higher_priority_goes_first() -> None:
    waiting = filled(offer("low", priority=-1), offer("usual"), offer("urgent", priority=9), offer("also"))
    assert order(waiting) == ["urgent", "usual", "also", "low"]


def test_priorities_are_of_one_project() -> None:
    urgent = [offer(f"a{number}", project="a", priority=100) for number in range(20)]
    waiting = filled(*urgent, offer("b0", project="b", priority=-100), offer("b1", project="b"))
    assert order(waiting)[:4] == ["a0", "b1", "a1", "b0"]


def test_projects_take_turns() -> None:
    waiting = filled(
        *(offer(f"a{n}", project="a") for n in range(3)), offer("b0", project="b"), offer("b1", project="b")
    )
    assert order(waiting) == ["a0", "b0", "a1", "b1", "a2"]


KNOWN = {"a": {"merge"}, "b": {"merge"}, "other": {"validate"}}


def goes_to(waiting: Waiting, worker: str, known: dict[str, set[str]]) -> bool:
    abilities = {name: Abilities(frozenset(stages)) for name, stages in known.items()}
    return waiting.first(worker, abilities, projects=waiting.projects) is not None


def test_what_is_postponed_goes_to_nobody_until_its_time() -> None:
    waiting = Waiting()
    waiting.add(replace(offer("later"), not_before=100.0), now=90.0)
    waiting.release(now=99.0)
    assert not goes_to(waiting, "a", KNOWN)
    waiting.add(offer("now"), now=99.0)
    assert order(waiting) == ["now"]
    waiting.release(now=100.0)
    assert order(waiting) == ["later"]
    assert len(waiting) == 0


def test_what_failed_on_a_worker_goes_to_another_at_once() -> None:
    waiting = Waiting()
    waiting.add(replace(offer("x"), not_before=100.0, avoid=("a",)), now=90.0)
    assert not goes_to(waiting, "a", KNOWN)
    assert goes_to(waiting, "b", KNOWN)


def test_what_failed_on_a_worker_waits_for_another_as_long_as_there_is_one() -> None:
    waiting = Waiting()
    waiting.add(replace(offer("x"), not_before=100.0, avoid=("a",)), now=90.0)
    assert not goes_to(waiting, "a", {"a": {"merge"}}), "it is too soon for the worker that is alone"
    waiting.release(now=100.0)
    assert not goes_to(waiting, "a", KNOWN), "there is another, busy or not"
    assert goes_to(waiting, "a", {"a": {"merge"}, "other": {"validate"}})


def test_a_worker_gets_what_it_runs() -> None:
    waiting = filled(offer("x", stage="merge"), offer("y", stage="validate"))
    assert order(waiting, "validate", "quantize") == ["y"]
    assert list(waiting) == ["projects/p/exports/x:m:1"]
    assert order(waiting) == ["x"]
    assert len(waiting) == 0


SOURCES = {"base": DIGEST, "adapter": DIGEST}
DEFAULTS = ExportConfiguration()


def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    with Harness(tmp_path, with_worker=False, options={"max_unended": 2}) as harness:
        client = harness.client
        first = client.create_export(DEFAULTS, sources=SOURCES, export_id="a")
        client.create_export(DEFAULTS, sources=SOURCES, export_id="b")
        assert client.create_export(DEFAULTS, sources=SOURCES, export_id="a").name == first.name
        request = export_pb2.CreateExportRequest(parent="projects/default", sources=SOURCES)
        with pytest.raises(grpc.RpcError) as caught:
            client._calls.exports.CreateExport(request)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        (data,) = [value for key, value in caught.value.trailing_metadata() if key == STATUS_KEY]
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status_pb2.Status.FromString(data).details)
        assert retry.retry_delay.seconds > 0
        client.cancel_export(first.name)
        assert state(client.create_export(DEFAULTS, sources=SOURCES, export_id="c")) in {"queued", "running"}


def test_the_queue_can_be_looked_at_while_it_changes() -> None:
    board, begun, looking = Board(30.0, time.monotonic), threading.Event(), threading.Event()
    for number in range(1000):
        board.offer(offer(str(number)))

    def look() -> int:
        counts = set()
        while not looking.is_set():
            counts.add(len(board.load().waiting))
            begun.set()
        return len(counts)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(1) as page:
            looked = page.submit(look)
            assert begun.wait(60)
            for number in range(1000, 30_000):
                board.withdraw(offer(str(number - 1000)).key)
                board.offer(offer(str(number)))
            looking.set()
            assert looked.result() > 0
    finally:
        sys.setswitchinterval(before)
