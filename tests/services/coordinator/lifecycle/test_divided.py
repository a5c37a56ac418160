"""What recovery changes of divided work: the task that joins the parts does all of it from then on."""

from __future__ import annotations

from slipway.formats.tasks import PlannedTask
from slipway.planning.division import divide
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, Resources, TaskRecord, TaskState
from slipway_coordinator.lifecycle.recovery import NextAttempt
from slipway_coordinator.lifecycle.scheduling import queue_next
from slipway_coordinator.lifecycle.transitions import Event, EventKind, apply, begin, cancel, restart

MODEL, CALIBRATION = "sha256:" + "1" * 64, "sha256:" + "2" * 64
QUANTIZE = PlannedTask(
    "quantize",
    "quantize",
    {"format": "pytorch", "level": "int8", "max_shard_bytes": 1 << 30},
    {"model": "source:base"},
    "pytorch-int8",
    output="model",
    reserve={"calibration": "task:calibrate/calibration"},
)
CALIBRATE = PlannedTask("calibrate", "calibrate", {}, {"model": "source:base"}, output="calibration")


def finished() -> ExportRecord:
    """An export whose divided quantization succeeded."""
    tasks = divide([CALIBRATE, QUANTIZE], split_bytes=4 << 30, weight_bytes=8 << 30)
    record = ExportRecord(
        name="projects/default/exports/e",
        configuration={},
        request_hash="h",
        sources={"base": MODEL},
        tasks=tuple(map(TaskRecord.from_plan, tasks)),
        create_time=0.0,
    )
    record = begin(record, now=1.0)
    for name in ("quantize.part-1", "quantize.part-2", "quantize"):
        task = record.task(name)
        event = Event(kind=EventKind.LEASED, time=2.0, task=name, attempt=1, worker="w", epoch=1)
        record = apply(record, event)
        made = {task.output: "sha256:" + f"{len(name):x}{name[-1] if name[-1].isdigit() else 0}".rjust(64, "a")}
        record = apply(record, event.model_copy(update={"kind": EventKind.SUCCEEDED, "outputs": made}))
    assert record.task("quantize").attempt.params["parts"] == 2
    return record


def following(**changes: object) -> NextAttempt:
    params = {"format": "pytorch", "level": "int8", "max_shard_bytes": 1 << 30, "parts": 2}
    return NextAttempt.model_validate({"rule": "r", "note": "n", "params": params, "resources": Resources(), **changes})


def rejected(record: ExportRecord) -> tuple[ExportRecord, TaskRecord]:
    running = record.with_(state=ExportState.RUNNING)
    task = running.task("quantize").with_(state=TaskState.RUNNING).with_attempt(state=TaskState.FAILED)
    return running.with_task(task), task


def test_another_level_is_made_in_one_piece_of_the_parts_inputs() -> None:
    record, task = rejected(finished())
    level = {**following().params, "level": "bf16"}
    changed = queue_next(record, task, following(params=level, format="pytorch-bf16"), now=3.0).task("quantize")
    assert changed.attempt.params == {"format": "pytorch", "level": "bf16", "max_shard_bytes": 1 << 30}
    assert changed.attempt.inputs == {"model": MODEL}
    assert (changed.inputs, changed.format) == ({"model": "source:base"}, "pytorch-bf16")
    assert "parts" not in changed.params


def test_inputs_in_reserve_join_those_of_the_parts() -> None:
    record, task = rejected(finished())
    waiting = queue_next(record, task, following(reserve=("calibration",)), now=3.0)
    changed = waiting.task("quantize")
    assert changed.state is TaskState.WAITING
    assert changed.attempt.inputs == {"model": MODEL}
    assert changed.inputs == {"model": "source:base", "calibration": "task:calibrate/calibration"}
    assert waiting.task("calibrate").state is TaskState.WAITING


def test_other_resources_leave_the_work_divided() -> None:
    record, task = rejected(finished())
    changed = queue_next(record, task, following(resources=Resources(threads=1)), now=3.0).task("quantize")
    assert changed.attempt.params["parts"] == 2
    assert sorted(changed.attempt.inputs) == ["part-001", "part-002"]


def test_a_retry_of_the_export_keeps_what_is_in_one_piece() -> None:
    record, task = rejected(finished())
    level = {**following().params, "level": "bf16"}
    again = restart(cancel(queue_next(record, task, following(params=level), now=3.0), now=4.0))
    changed = again.task("quantize")
    assert (changed.state, changed.inputs) == (TaskState.WAITING, {"model": "source:base"})
    assert [again.task(f"quantize.part-{number}").state for number in (1, 2)] == [TaskState.SUCCEEDED] * 2
    begun = begin(again, now=5.0).task("quantize")
    assert begun.attempt.inputs == {"model": MODEL}
    assert begun.attempt.params == {"format": "pytorch", "level": "int8", "max_shard_bytes": 1 << 30}
