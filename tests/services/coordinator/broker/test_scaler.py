"""KEDA's external scaler, asked over a real socket of a real coordinator whose tasks wait, run and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipway.requirements import Needs, Requirements
from slipway_coordinator.lifecycle.records import TaskRecord
from slipway_protos.externalscaler import externalscaler_pb2 as scaler_pb2
from slipway_protos.externalscaler import externalscaler_pb2_grpc
from slipway_protos.v1 import worker_pb2, worker_pb2_grpc
from support.coordinators.harness import STAGE as ELSEWHERE
from support.coordinators.harness import Harness, tiny_export, tiny_task, wait_for

STAGE = "merge"  # installed, and no worker here runs it unless a test says so
Scaler = externalscaler_pb2_grpc.ExternalScalerStub


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path, with_worker=False, options={"workers_gone": False}) as running:
        yield running


@pytest.fixture
def channel(harness: Harness) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(harness.address) as open_channel:
        yield open_channel


@pytest.fixture
def scaler(channel: grpc.Channel) -> Scaler:
    return Scaler(channel)


def trigger(stage: str = STAGE, **metadata: str) -> scaler_pb2.ScaledObjectRef:
    metadata = {"scalerAddress": "slipway-coordinator.slipway.svc:7070", "stage": stage, **metadata}
    return scaler_pb2.ScaledObjectRef(name="slipway-worker", namespace="slipway", scalerMetadata=metadata)


def task(name: str, **more: Any) -> TaskRecord:
    return tiny_task(name, stage=STAGE, **more)


def value(scaler: Scaler, reference: scaler_pb2.ScaledObjectRef) -> float:
    """The metric as KEDA gets it: its name from the specification first."""
    (spec,) = scaler.GetMetricSpec(reference).metricSpecs
    assert spec.targetSizeFloat == spec.targetSize == 1
    request = scaler_pb2.GetMetricsRequest(scaledObjectRef=reference, metricName=spec.metricName)
    (metric,) = scaler.GetMetrics(request).metricValues
    assert metric.metricName == spec.metricName
    assert metric.metricValueFloat == metric.metricValue
    return float(metric.metricValueFloat)


def worker(channel: grpc.Channel, name: str, *, architecture: str = "") -> Callable[..., list[worker_pb2.TaskLease]]:
    """Calls of a worker with a GPU: give ``free`` to ask for tasks, ``full`` to take none; it reports the leases it was given before."""
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    held: list[worker_pb2.TaskLease] = []

    def synchronize(*, free: int = 0, full: bool = False) -> list[worker_pb2.TaskLease]:
        request = worker_pb2.SynchronizeRequest(worker_id=name, stages=[STAGE], free_slots=free, draining=full)
        request.capabilities.gpu_architecture = architecture
        for lease in held:
            request.running.add(task=lease.task, lease_epoch=lease.lease_epoch)
        held.extend(stub.Synchronize(request).leases)
        return held

    return synchronize


def finish(channel: grpc.Channel, name: str, lease: worker_pb2.TaskLease) -> None:
    request = worker_pb2.CompleteTaskRequest(worker_id=name, task=lease.task, lease_epoch=lease.lease_epoch)
    request.output.outputs["out"] = "sha256:" + "0" * 64
    worker_pb2_grpc.WorkerServiceStub(channel).CompleteTask(request)


def test_a_stage_from_elsewhere_is_known_while_there_is_work_for_it(harness: Harness, scaler: Scaler) -> None:
    with pytest.raises(grpc.RpcError):
        scaler.IsActive(trigger(ELSEWHERE))
    harness.submit(tiny_export("elsewhere", tiny_task("a")))
    wait_for(lambda: harness.server.coordinator.broker.board.load().waiting)
    assert scaler.IsActive(trigger(ELSEWHERE)).result


def test_nothing_to_do_is_what_scales_to_zero(scaler: Scaler) -> None:
    reference = trigger()
    assert not scaler.IsActive(reference).result
    assert value(scaler, reference) == 0


def test_waiting_and_running_tasks_count_until_they_end(
    harness: Harness, channel: grpc.Channel, scaler: Scaler
) -> None:
    name = harness.submit(tiny_export("three", task("a"), task("b"), task("c", needs=("a",))))
    wait_for(lambda: value(scaler, trigger()) == 2)  # c is not due before a has ended
    assert scaler.IsActive(trigger()).result

    synchronize = worker(channel, "w")
    a, b = sorted(synchronize(free=2), key=lambda lease: lease.task)
    assert value(scaler, trigger()) == 2  # running ones count as waiting ones do

    finish(channel, "w", b)
    wait_for(lambda: value(scaler, trigger()) == 1)
    finish(channel, "w", a)
    assert [lease.task.split(":")[1] for lease in wait_for(lambda: synchronize(free=1)[2:])] == ["c"]
    assert value(scaler, trigger()) == 1
    finish(channel, "w", synchronize()[2])
    harness.finished(name)
    assert not scaler.IsActive(trigger()).result
    assert value(scaler, trigger()) == 0


def test_stages_are_told_apart(harness: Harness, scaler: Scaler) -> None:
    harness.submit(tiny_export("two", task("m"), tiny_task("v", stage="validate")))
    wait_for(lambda: value(scaler, trigger()) == 1 and value(scaler, trigger("validate")) == 1)
    assert value(scaler, trigger("quantize")) == 0


def test_running_tasks_count_for_the_gpus_they_run_on(harness: Harness, channel: grpc.Channel, scaler: Scaler) -> None:
    ada, hopper = trigger(gpuArchitecture="sm89"), trigger(gpuArchitecture="sm90")
    harness.submit(tiny_export("gpus", *(task(name) for name in "abc")))
    wait_for(lambda: value(scaler, trigger()) == 3)
    assert value(scaler, ada) == value(scaler, hopper) == 3  # either may take those that wait

    assert len(worker(channel, "ada", architecture="sm89")(free=2)) == 2
    assert (value(scaler, ada), value(scaler, hopper), value(scaler, trigger())) == (3, 1, 3)
    assert len(worker(channel, "hopper", architecture="sm90")(free=1)) == 1
    assert (value(scaler, ada), value(scaler, hopper), value(scaler, trigger())) == (2, 1, 3)


def test_tasks_count_for_those_who_could_run_them(harness: Harness, channel: grpc.Channel, scaler: Scaler) -> None:
    on_ada = Requirements(any_of=(Needs(gpu_architectures=("sm89",)),))
    on_any = Requirements(any_of=(Needs(gpu=True), Needs(gpu=True, libraries=("tensorrt-rtx",))))
    either = Requirements(any_of=(Needs(gpu=True), Needs(libraries=("tensorrt-rtx",))), prefers=(Needs(gpu=True),))
    tasks = {"ada": on_ada, "gpu": on_any, "either": either, "all": Requirements()}
    record = tiny_export("for-whom", *(task(name).with_(requirements=needs) for name, needs in tasks.items()))
    harness.submit(record)
    triggers = [trigger(), *(trigger(gpuArchitecture=name) for name in ("sm89", "sm90", "none"))]
    assert wait_for(lambda: value(scaler, triggers[0]) == 4)
    assert [value(scaler, one) for one in triggers] == [4, 4, 3, 2]

    # Running ones count for the workers they run on.
    assert len(worker(channel, "plain")(free=4)) == 1, "the others need, or would rather have, what it lacks"
    assert [value(scaler, one) for one in triggers] == [4, 3, 2, 2]
    assert len(worker(channel, "hopper", architecture="sm90")(free=4)) == 2
    assert [value(scaler, one) for one in triggers] == [4, 1, 2, 1]


def test_tasks_of_all_stages_of_a_trigger_are_added_up(harness: Harness, channel: grpc.Channel, scaler: Scaler) -> None:
    both = trigger("combine,merge", gpuArchitecture="none")
    assert value(scaler, both) == 0
    combining = [tiny_task(name, stage="combine") for name in "xyz"]
    name = harness.submit(tiny_export("sum", task("a"), task("b"), *combining, tiny_task("v", stage="validate")))
    wait_for(lambda: value(scaler, both) == 5)
    assert (value(scaler, trigger("combine")), value(scaler, trigger("merge"))) == (3, 2)
    assert value(scaler, trigger("merge,combine", gpuArchitecture="none")) == 5
    (running,) = worker(channel, "w")(free=1)
    assert value(scaler, both) == 5
    finish(channel, "w", running)
    wait_for(lambda: value(scaler, both) == 4)
    harness.client.cancel_export(name)
    wait_for(lambda: not scaler.IsActive(both).result)


def test_a_worker_that_takes_no_tasks_is_not_the_one_they_wait_for(
    harness: Harness, channel: grpc.Channel, scaler: Scaler
) -> None:
    """As many replicas as there are tasks would be the full ones; they go when nothing waits any more."""
    full = [worker(channel, name) for name in ("first", "second")]
    elsewhere, nowhere = worker(channel, "ada", architecture="sm89"), trigger("validate")
    for one in (*full, elsewhere):
        one(free=1, full=True)
    reference = trigger(gpuArchitecture="none")
    assert value(scaler, reference) == 0
    assert not scaler.IsActive(reference).result
    harness.submit(tiny_export("waits", task("a")))
    wait_for(lambda: value(scaler, reference) == 3)
    assert (value(scaler, trigger()), value(scaler, nowhere)) == (4, 0)

    (lease,) = worker(channel, "third")(free=1)
    assert value(scaler, reference) == 1
    finish(channel, "third", lease)
    wait_for(lambda: value(scaler, reference) == 0)

    harness.submit(tiny_export("room", task("a"), task("b")))
    wait_for(lambda: value(scaler, reference) == 4)
    (lease,) = full[0](free=1)  # there is room again
    assert value(scaler, reference) == 3
    full[0](full=True)  # and none again: it is there for what it runs
    assert value(scaler, reference) == 3


def test_changes_are_pushed(harness: Harness, scaler: Scaler) -> None:
    answers = scaler.StreamIsActive(trigger(), timeout=120)
    assert next(answers).result is False
    name = harness.submit(tiny_export("pushed", task("m")))
    assert next(answers).result is True
    harness.client.cancel_export(name)
    assert next(answers).result is False
    answers.cancel()


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"stage": ""}, "stage"),
        ({"stage": "mergee"}, "mergee"),
        ({"stage": "merge,mergee"}, "mergee"),
        ({"stage": "merge,"}, "stage"),
        ({"stage": "merge", "gpuArchitecture": "L40S"}, "sm89"),
    ],
)
def test_triggers_that_fit_nothing_are_refused(scaler: Scaler, metadata: dict[str, str], word: str) -> None:
    reference = trigger(**metadata)
    metrics = scaler_pb2.GetMetricsRequest(scaledObjectRef=reference, metricName="slipway-merge")
    for call in (
        lambda: scaler.IsActive(reference),
        lambda: next(scaler.StreamIsActive(reference, timeout=120)),
        lambda: scaler.GetMetricSpec(reference),
        lambda: scaler.GetMetrics(metrics),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert word in caught.value.details()


def test_another_triggers_metric_is_refused(scaler: Scaler) -> None:
    request = scaler_pb2.GetMetricsRequest(scaledObjectRef=trigger(), metricName="slipway-validate")
    with pytest.raises(grpc.RpcError, match="slipway-merge") as caught:
        scaler.GetMetrics(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_metric_names_are_ones_that_kubernetes_takes(scaler: Scaler) -> None:
    (spec,) = scaler.GetMetricSpec(trigger("onnx_export", gpuArchitecture="sm120")).metricSpecs
    assert spec.metricName == "slipway-onnx-export-sm120"
    (spec,) = scaler.GetMetricSpec(trigger("merge,combine", gpuArchitecture="none")).metricSpecs
    assert spec.metricName == "slipway-combine-merge-none"


def test_health_knows_the_scaler(channel: grpc.Channel) -> None:
    request = health_pb2.HealthCheckRequest(service="externalscaler.ExternalScaler")
    answer = health_pb2_grpc.HealthStub(channel).Check(request)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
