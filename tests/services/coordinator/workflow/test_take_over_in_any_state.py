"""An export under way is taken over by another version from every state it may be in, with nothing lost or repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipway.configuration import parse
from slipway.registry import IMPORT
from slipway.rpc.values import failure_of_status
from slipway_coordinator.lifecycle.importing import import_task
from slipway_coordinator.lifecycle.records import TaskRecord
from slipway_coordinator.workflow import engine
from slipway_protos.v1 import export_pb2, worker_pb2
from support.coordinators.harness import DIGEST, Harness, state, states, tiny_export, tiny_task, wait_for
from support.coordinators.liar import Liar

ENDED = {"succeeded", "failed", "cancelled"}
DONE = worker_pb2.TaskOutput(outputs={"pytorch": DIGEST})


class Versions:
    """Coordinators of one version after the other over one state, in this process, and a worker that stays."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._home, self._monkeypatch = home, monkeypatch

    @contextmanager
    def of(self, version: str) -> Iterator[tuple[Harness, Liar]]:
        self._monkeypatch.setattr(engine, "WORKFLOW_VERSION", version)
        with Harness(self._home, with_worker=False, options={"workers_gone": False}) as harness:
            liar = Liar(harness.address)
            try:
                yield harness, liar
            finally:
                liar.close()


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Versions:
    return Versions(tmp_path, monkeypatch)


def merges(*ids: str) -> tuple[TaskRecord, ...]:
    return tuple(tiny_task(each, stage="merge").with_(output="pytorch", params={}) for each in ids)


def export_of(harness: Harness) -> export_pb2.Export:
    return harness.client.get_export("x")


def ended(harness: Harness) -> export_pb2.Export:
    export: export_pb2.Export = wait_for(lambda: state(export_of(harness)) in ENDED and export_of(harness))
    return export


def test_a_task_that_nobody_has_begun(versions: Versions) -> None:
    with versions.of("a") as (harness, _):
        harness.submit(tiny_export("x", *merges("m")))
        wait_for(lambda: states(export_of(harness)) == {"m": "queued"})
    for version in ("b", "c"):
        with versions.of(version) as (harness, _):
            assert states(export_of(harness)) == {"m": "queued"}
    with versions.of("a") as (harness, liar):
        assert liar.bring(liar.lease(), output=DONE) == ""
        export = ended(harness)
        assert (state(export), len(export.tasks[0].attempts)) == ("succeeded", 1)


def test_a_lease_that_its_worker_still_holds(versions: Versions) -> None:
    """Each process ends while it takes the export over, and the first version comes back: as a failed upgrade does."""
    with versions.of("a") as (harness, liar):
        harness.submit(tiny_export("x", *merges("m")))
        lease = liar.lease()
    with versions.of("b") as (harness, liar):
        # The first process may have ended before it noted that.
        wait_for(lambda: states(export_of(harness)) == {"m": "running"})
    with versions.of("a") as (harness, liar):
        assert liar.bring(lease, output=DONE) == ""
        assert liar.bring(lease, output=DONE) == "", "handed in again"
        export = ended(harness)
        assert (state(export), len(export.tasks[0].attempts)) == ("succeeded", 1)


def test_an_export_that_is_being_cancelled(versions: Versions) -> None:
    with versions.of("a") as (harness, liar):
        harness.submit(tiny_export("x", *merges("m")))
        lease = liar.lease()
        harness.client.cancel_export("x")
        wait_for(lambda: state(export_of(harness)) == "cancelling")
    with versions.of("b") as (harness, liar):
        assert state(export_of(harness)) == "cancelling"
        wait_for(lambda: liar.told_to_cancel(lease))
        assert liar.bring(lease, cancelled={}) == ""
        assert state(ended(harness)) == "cancelled"


@pytest.mark.slow
def test_a_failure_whose_next_attempt_waits_for_its_time(versions: Versions) -> None:
    with versions.of("a") as (harness, liar):
        harness.submit(tiny_export("x", *merges("m")))
        lease = liar.lease()
        status = worker_pb2.CompleteTaskRequest().error
        status.code, status.message = 14, "the store is away"
        detail = status.details.add()
        detail.Pack(_unavailable())
        assert liar.bring(lease, error=status) == ""
        wait_for(lambda: len(export_of(harness).tasks[0].attempts) == 2)
        before = export_of(harness).tasks[0].attempts[1]
    with versions.of("b") as (harness, liar):
        export = export_of(harness)
        assert len(export.tasks[0].attempts) == 2
        assert export.tasks[0].attempts[1].rule == before.rule != ""
        lease = liar.lease()
        assert lease.task.endswith(":m:2")
        assert liar.bring(lease, output=DONE) == ""
        assert state(ended(harness)) == "succeeded"


@pytest.mark.slow
def test_an_import_after_which_the_rest_is_planned(versions: Versions) -> None:
    settings = {
        "checkpoint": {"path": "s3://runs/a"},
        "base_model": {"name": "hf://org/base"},
        "formats": {"onnx": {"enabled": False}},
        "validation": {"enabled": False},
    }
    planned = import_task(parse(settings), {}, {"base": "hf://org/base", "adapter": "s3://runs/a"})
    with versions.of("a") as (harness, liar):
        harness.submit(tiny_export("x", TaskRecord.from_plan(planned), **settings).with_(sources={}))
        lease = liar.lease(IMPORT)
    with versions.of("b") as (harness, liar):
        assert liar.bring(lease, output=worker_pb2.TaskOutput(outputs={"base": DIGEST, "adapter": DIGEST})) == ""
        wait_for(lambda: len(export_of(harness).tasks) > 1)
        before = states(export_of(harness))
    with versions.of("c") as (harness, liar):
        assert states(export_of(harness)) == before == {"import": "succeeded", "merge": "queued"}
        assert liar.bring(liar.lease(), output=DONE) == ""
        assert state(ended(harness)) == "succeeded"


@pytest.mark.slow
def test_an_ended_export_that_is_tried_again(versions: Versions) -> None:
    with versions.of("a") as (harness, liar):
        harness.submit(tiny_export("x", *merges("m", "n"), recovery={"max_attempts": 1}))
        assert liar.bring(liar.lease(), output=DONE) == ""
        assert liar.bring(liar.lease(), output=worker_pb2.TaskOutput(outputs={"pytorch": "none"})) == "RESULT_INVALID"
        export = ended(harness)
        assert failure_of_status(export.error).reason == "RESULT_INVALID"
    with versions.of("b") as (harness, liar):
        harness.client.retry_export("x")
        lease = liar.lease()
        assert ":n:" in lease.task, "what succeeded is not repeated"
    with versions.of("c") as (harness, liar):
        assert liar.bring(lease, output=DONE) == ""
        assert state(ended(harness)) == "succeeded"


def _unavailable() -> object:
    from google.rpc import error_details_pb2

    info = error_details_pb2.ErrorInfo(reason="STORE_UNAVAILABLE", domain="slipway")
    info.metadata["retryable"] = "true"
    return info
