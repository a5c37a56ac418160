"""What a coordinator can make, its workers and its queue: real workers join and leave, and each caller sees what its projects show."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.formats.registry import formats
from slipway.rpc.values import dict_of, failure_of_status
from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_protos.v1 import coordinator_pb2 as pb
from slipway_protos.v1 import worker_pb2, worker_pb2_grpc
from support.coordinators.artifact_places import PEOPLE, Place
from support.coordinators.harness import STAGE, tiny_export, tiny_task, wait_for
from support.coordinators.joined_workers import MACHINE, joined

MORE = {
    **PEOPLE,
    "operator": "role: operator, projects: [red]",
    "auditor": 'role: viewer, projects: ["*"]',
    "robots": "role: worker",
}
GPU = replace(MACHINE, gpu_architecture="sm89", gpu_memory_bytes=24 << 30, libraries={"tensorrt": "10.9"})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path, people=MORE, workers_gone=False, lease_seconds=1.0) as place:
        yield place


def submit(place: Place, project: str, export_id: str, **params: object) -> str:
    """Create an export of a project, whose only task any worker of the tiny stage runs."""
    record = tiny_export(export_id, tiny_task("a", **params), base=place.base())
    renamed = {**record.model_dump(), "name": f"projects/{project}/exports/{export_id}"}
    return place.submit(ExportRecord.model_validate(renamed))


def workers_of(place: Place, who: str) -> pb.ListWorkersResponse:
    with place.client_of(who) as client:
        return client.list_workers()


def formats_of(place: Place, who: str = "viewer") -> dict[str, pb.Format]:
    with place.client_of(who) as client:
        return {each.name: each for each in client.list_formats()}


def obstacle(part: pb.Format | pb.FormatLevel) -> tuple[str, str]:
    """Return reason and stage of what keeps an output from being made."""
    assert not part.available
    failure = failure_of_status(part.obstacle)
    assert failure.message
    assert failure.remedy
    return failure.reason, failure.about["stage"]


def test_without_a_worker_every_format_says_what_to_start(place: Place) -> None:
    found = formats_of(place)
    assert list(found) == list(formats()), "in the order of tables"
    for name, each in found.items():
        known = formats()[name]
        assert each.title == known.title
        assert [level.name for level in each.levels] == list(known.levels)
        assert {target.name for target in each.targets} == {fit.target for fit in known.fits}
        assert obstacle(each) == ("NO_WORKER", each.stages[0])
        assert f"--stage {each.stages[0]}" in failure_of_status(each.obstacle).remedy
        schema = dict_of(each.settings_schema)
        assert set(schema["properties"]) == set(known.settings.model_fields)
        assert schema["properties"]["enabled"]["description"]
        for level in each.levels:
            assert obstacle(level)[0] == "NO_WORKER"
    assert list(found["gguf"].stages) == ["merge", "gguf"]
    assert list(found["pytorch"].stages) == ["merge"]
    assert workers_of(place, "admin") == pb.ListWorkersResponse()


def test_formats_are_possible_while_workers_of_all_their_stages_live(place: Place) -> None:
    security = place.security_of("robots")
    with joined(place, "one", stages=("merge", "gguf"), security=security) as one:
        found = formats_of(place)
        assert found["gguf"].available
        assert all(level.available for level in found["gguf"].levels)
        assert not found["gguf"].HasField("obstacle")
        assert found["pytorch"].available
        assert obstacle(found["pytorch"].levels[0]) == ("NO_WORKER", "quantize")
        assert obstacle(found["onnx"]) == ("NO_WORKER", "onnx_export")
        one.drain()
        wait_for(lambda: obstacle_or_none(place, "gguf") == ("WORKERS_DRAINING", "merge"))
        with joined(place, "two", stages=("merge",), security=security):
            wait_for(lambda: obstacle_or_none(place, "gguf") == ("WORKERS_DRAINING", "gguf"))
    wait_for(lambda: obstacle_or_none(place, "gguf") == ("NO_WORKER", "merge"))


def test_a_reason_tells_what_hidden_workers_have_but_not_their_names(place: Place) -> None:
    stages = ("merge", "onnx_export", "tensorrt_build")
    with joined(
        place, "secret-name", stages=stages, machine=replace(GPU, libraries={}), security=place.security_of("robots")
    ):
        found = workers_of(place, "viewer")
        assert (len(found.workers), found.hidden_workers) == (0, 1)
        text = failure_of_status(formats_of(place)["tensorrt"].obstacle).message
    assert "sm89" in text
    assert "no tensorrt" in text
    assert "secret-name" not in text


def test_judging_outputs_is_an_obstacle_of_its_own(place: Place) -> None:
    def judging() -> tuple[str, str] | None:
        with place.client_of("viewer") as client:
            failure = client.validation_obstacle()
            request = pb.ListFormatsRequest(page_size=3)
            pages = [client._calls.call(client._calls.coordinator.ListFormats, request)]
            request.page_token = pages[0].next_page_token
            pages.append(client._calls.call(client._calls.coordinator.ListFormats, request))
        if failure is None:
            assert not any(page.HasField("validation_obstacle") for page in pages)
            return None
        assert all(failure_of_status(page.validation_obstacle) == failure for page in pages)
        assert f"--stage {failure.about['stage']}" in failure.remedy
        return failure.reason, failure.about["stage"]

    security = place.security_of("robots")
    assert judging() == ("NO_WORKER", "reference")
    with joined(place, "maker", stages=("merge", "gguf", "reference"), security=security):
        assert formats_of(place)["gguf"].available
        assert judging() == ("NO_WORKER", "validate")
        with joined(place, "judge", stages=("validate",), security=security):
            assert judging() is None


def obstacle_or_none(place: Place, name: str) -> tuple[str, str] | None:
    found = formats_of(place)[name]
    return None if found.available else obstacle(found)


def test_an_engine_needs_a_gpu_and_its_library(place: Place) -> None:
    security, stages = place.security_of("robots"), ("merge", "onnx_export", "tensorrt_build")
    with joined(place, "plain", stages=stages, security=security):
        assert obstacle_or_none(place, "tensorrt") == ("WORKER_UNFIT", "tensorrt_build")
        assert "no GPU" in failure_of_status(formats_of(place)["tensorrt"].obstacle).message
        lacking = replace(GPU, libraries={})
        with joined(place, "library", stages=("tensorrt_build",), security=security, machine=lacking):
            assert obstacle_or_none(place, "tensorrt") == ("WORKER_UNFIT", "tensorrt_build")
        with joined(place, "gpu", stages=("tensorrt_build",), security=security, machine=GPU):
            assert obstacle_or_none(place, "tensorrt") is None


def test_each_caller_sees_the_workers_that_run_its_tasks(place: Place) -> None:
    stop = place.home / "stop"
    security = place.security_of("robots")
    with joined(place, "busy", security=security), joined(place, "idle", stages=("merge",), security=security):
        name = submit(place, "red", "ours", sleep_seconds=300.0, unless=str(stop))
        submit(place, "blue", "theirs", sleep_seconds=0.0)
        submit(place, "blue", "theirs-too", stage="gguf")
        wait_for(lambda: [worker.running_tasks for worker in workers_of(place, "viewer").workers] == [1])
        wait_for(lambda: len(workers_of(place, "admin").queue) == 2)
        try:
            check_sights(place, name)
        finally:
            stop.touch()
    wait_for(lambda: not workers_of(place, "admin").workers)


def check_sights(place: Place, name: str) -> None:
    everything = workers_of(place, "admin")
    assert [worker.name for worker in everything.workers] == ["robots/busy", "robots/idle"]
    assert everything.hidden_workers == 0
    busy, idle = everything.workers
    assert [(each.export, each.task, each.attempt, each.stage) for each in busy.tasks] == [(name, "a", 1, STAGE)]
    assert (busy.slots, busy.running_tasks, busy.state) == (1, 1, pb.WORKER_STATE_ACTIVE)
    assert (list(idle.stages), idle.slots, idle.running_tasks, list(idle.tasks)) == (["merge"], 1, 0, [])
    machine = busy.machine
    assert (machine.processors, machine.task_memory_bytes) == (3, int((8 << 30) * 0.8))
    assert (machine.scratch_bytes, machine.gpu_architecture) == (64 << 30, "")
    assert 0 < busy.join_time.ToSeconds() <= busy.report_time.ToSeconds()
    waiting = {(each.project, each.stage): each for each in everything.queue}
    assert waiting["blue", STAGE].reason == pb.WAIT_REASON_NO_ROOM
    assert waiting["blue", "gguf"].reason == pb.WAIT_REASON_NO_WORKER
    assert all(each.count == 1 and each.detail and each.oldest_age_seconds > 0 for each in everything.queue)
    for who in ("viewer", "submitter", "operator"):  # of red
        ours = workers_of(place, who)
        assert list(ours.workers) == [replaced(ours.workers[0], busy)]
        assert ours.hidden_workers == 1
        assert {(each.project, each.stage) for each in ours.queue} == {("", STAGE), ("", "gguf")}
        assert all(
            (each.count, each.oldest_age_seconds, each.reason, each.detail) == (1, 0.0, 0, "") for each in ours.queue
        )
        assert "blue" not in str(ours)
        assert "theirs" not in str(ours)
    theirs = workers_of(place, "neighbour")
    assert (list(theirs.workers), theirs.hidden_workers) == ([], 2)
    assert {(each.project, each.stage) for each in theirs.queue} == {("blue", STAGE), ("blue", "gguf")}
    assert "red" not in str(theirs)
    seen = workers_of(place, "auditor")  # of all projects, but no operator: an idle worker shows none of them
    assert ([worker.name for worker in seen.workers], seen.hidden_workers) == (["robots/busy"], 1)
    assert {each.project for each in seen.queue} == {"blue"}
    with place.client_of("robots") as client, pytest.raises(ModelExportError) as caught:
        client.list_workers()
    assert caught.value.reason == "PERMISSION_DENIED"


def replaced(seen: pb.Worker, whole: pb.Worker) -> pb.Worker:
    """Return a worker as another caller sees it, with the time of another moment."""
    copy = pb.Worker()
    copy.CopyFrom(whole)
    copy.report_time.CopyFrom(seen.report_time)
    return copy


def test_a_worker_that_leaves_or_falls_silent_is_gone(place: Place) -> None:
    security = place.security_of("robots")
    with joined(place, "leaves", security=security) as leaves, joined(place, "vanishes", security=security) as vanishes:
        assert len(workers_of(place, "admin").workers) == 2
        leaves.leave()
        assert [worker.name for worker in workers_of(place, "admin").workers] == ["robots/vanishes"]
        vanishes.vanish()
        wait_for(lambda: not workers_of(place, "admin").workers)


def test_a_worker_without_room_says_so_while_its_task_goes_on(place: Place) -> None:
    stop, security = place.home / "stop", place.security_of("robots")
    with joined(place, "full", security=security) as full:
        submit(place, "red", "last", sleep_seconds=300.0, unless=str(stop))
        wait_for(lambda: workers_of(place, "viewer").workers)
        full.drain()
        wait_for(lambda: workers_of(place, "viewer").workers[0].state == pb.WORKER_STATE_DRAINING)
        submit(place, "red", "late")
        wait_for(lambda: workers_of(place, "viewer").queue)
        assert workers_of(place, "viewer").queue[0].reason == pb.WAIT_REASON_WORKERS_DRAINING
        stop.touch()


def test_a_worker_of_an_earlier_version_has_as_many_slots_as_it_shows(place: Place) -> None:
    with place.client_of("robots") as client:
        request = worker_pb2.SynchronizeRequest(worker_id="old", stages=["merge"], free_slots=3)
        stub = client._calls._channel.stub(worker_pb2_grpc.WorkerServiceStub)
        request.max_wait.FromMilliseconds(1)
        stub.Synchronize(request, metadata=client._calls.metadata())
        hostile = worker_pb2.SynchronizeRequest(worker_id="odd", stages=["merge"], free_slots=-5, slots=-1)
        hostile.capabilities.processors = -7
        hostile.capabilities.scratch_bytes = -1
        hostile.max_wait.FromMilliseconds(1)
        stub.Synchronize(hostile, metadata=client._calls.metadata())
    old, odd = workers_of(place, "admin").workers
    assert (old.slots, old.machine.processors) == (3, 0)
    assert (odd.slots, odd.machine.processors, odd.machine.scratch_bytes) == (0, 0, 0)


def test_pages_have_each_worker_once_while_others_come_and_go(place: Place) -> None:
    security = place.security_of("robots")
    with (
        joined(place, "a", security=security),
        joined(place, "b", security=security) as second,
        joined(place, "c", security=security),
        place.client_of("admin") as client,
    ):
        submit(place, "red", "waits", stage="gguf")
        wait_for(lambda: workers_of(place, "admin").queue)
        first = page(client, "", 1)
        assert [worker.name for worker in first.workers] == ["robots/a"]
        assert len(first.queue) == 1
        second.leave()
        with joined(place, "d", security=security):
            rest = page(client, first.next_page_token, 5)
            assert [worker.name for worker in rest.workers] == ["robots/c", "robots/d"]
            assert (rest.next_page_token, list(rest.queue)) == ("", [])
            assert [worker.name for worker in client.list_workers(page_size=1).workers] == [
                "robots/a", "robots/c", "robots/d",
            ]  # fmt: skip


def page(client: Client, token: str, size: int) -> pb.ListWorkersResponse:
    request = pb.ListWorkersRequest(page_token=token, page_size=size)
    return client._calls.call(client._calls.coordinator.ListWorkers, request)


def test_pages_of_formats_go_on_and_hostile_tokens_are_refused(place: Place) -> None:
    with place.client_of("admin") as client:
        assert [each.name for each in client.list_formats(page_size=5)] == list(formats())
        calls = client._calls
        token = calls.call(calls.coordinator.ListFormats, pb.ListFormatsRequest(page_size=2)).next_page_token
        forged = base64.urlsafe_b64encode(base64.urlsafe_b64decode(token).replace(b"onnx", b"none")).decode()
        assert forged != token
        hostile = ["x", "AAAA", token[:-4], token + token, forged, "é" * 50, "A" * 300, " " + token]
        for kind, call in (
            (pb.ListFormatsRequest, calls.coordinator.ListFormats),
            (pb.ListWorkersRequest, calls.coordinator.ListWorkers),
        ):
            for text in hostile if kind is pb.ListFormatsRequest else [*hostile, token]:
                with pytest.raises(ModelExportError) as caught:
                    calls.call(call, kind(page_token=text))
                assert caught.value.reason in {"REQUEST_INVALID", "LIMIT_EXCEEDED"}, text
                assert caught.value.about["field"] == "page_token"
            with pytest.raises(ModelExportError) as caught:
                calls.call(call, kind(page_size=-1))
            assert caught.value.about["field"] == "page_size"


def test_a_token_of_another_caller_is_refused(place: Place) -> None:
    security = place.security_of("robots")
    with joined(place, "a", security=security), joined(place, "b", security=security):
        with place.client_of("admin") as admin:
            token = page(admin, "", 1).next_page_token
        with place.client_of("viewer") as viewer, pytest.raises(ModelExportError) as caught:
            page(viewer, token, 1)
    assert caught.value.reason == "REQUEST_INVALID"
