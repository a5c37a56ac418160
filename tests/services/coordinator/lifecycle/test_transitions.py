"""How an export moves on, as pure functions; whatever happens in whatever order, it ends in a legal state."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.errors import Failure
from slipway_coordinator.lifecycle import transitions
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, TaskState
from slipway_coordinator.lifecycle.recovery import NextAttempt
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from support.coordinators.harness import tiny_export, tiny_task

OOPS = Failure(reason="STAGE_ERROR", message="oops")


def diamond() -> ExportRecord:
    """merge, then a and b side by side, then a validation over what there is."""
    tasks = (
        tiny_task("m"),
        tiny_task("a", needs=("m",)),
        tiny_task("a2", needs=("a",)),
        tiny_task("b", needs=("m",)),
        tiny_task("v", needs=("m", "a", "a2", "b"), partial=True),
    )
    return transitions.begin(tiny_export("x", *tasks), now=1.0)


def happens(record: ExportRecord, kind: EventKind, task: str = "", **more: Any) -> ExportRecord:
    attempt = record.task(task).attempt.number if task else 0
    return transitions.apply(record, Event(kind=kind, time=2.0, task=task, attempt=attempt, **more))


def succeed(record: ExportRecord, *tasks: str) -> ExportRecord:
    for task in tasks:
        record = happens(record, EventKind.LEASED, task, worker="w")
        record = happens(record, EventKind.SUCCEEDED, task, outputs={"out": f"sha256:{task}"})
    return record


def fail(record: ExportRecord, task: str) -> ExportRecord:
    record = happens(record, EventKind.LEASED, task, worker="w")
    return transitions.give_up(happens(record, EventKind.FAILED, task, failure=OOPS), task, OOPS, now=3.0)


def states(record: ExportRecord) -> str:
    return " ".join(f"{task.id}:{task.state}" for task in record.tasks)


def test_independent_branches_are_queued_side_by_side() -> None:
    assert states(succeed(diamond(), "m")) == "m:succeeded a:queued a2:waiting b:queued v:waiting"


def test_inputs_are_the_digests_of_what_was_made() -> None:
    record = succeed(diamond(), "m", "a", "a2", "b")
    assert record.task("v").attempt.inputs == {f"from-{name}": f"sha256:{name}" for name in ("m", "a", "a2", "b")}


def test_all_done_is_success() -> None:
    record = succeed(diamond(), "m", "a", "a2", "b", "v")
    assert record.state is ExportState.SUCCEEDED
    assert list(record.outputs) == ["m", "a", "a2", "b", "v"]


def test_a_failed_branch_skips_what_needs_it_and_nothing_else() -> None:
    record = fail(succeed(diamond(), "m"), "a")
    assert states(record) == "m:succeeded a:failed a2:skipped b:queued v:waiting"
    record = succeed(record, "b")
    assert record.task("v").attempt.inputs == {"from-m": "sha256:m", "from-b": "sha256:b"}
    record = succeed(record, "v")
    assert (record.state, record.failure) == (ExportState.FAILED, OOPS)
    assert list(record.outputs) == ["m", "b", "v"]


def test_without_the_first_task_nothing_is_left() -> None:
    record = fail(diamond(), "m")
    assert states(record) == "m:failed a:skipped a2:skipped b:skipped v:skipped"
    assert record.state is ExportState.FAILED


def test_the_error_that_decides_is_the_exports_whichever_came_first() -> None:
    passing = Failure(reason="DISK_FULL", message="it may pass")
    wrong = Failure(reason="EXPORT_PARITY_FAILED", message="it computes something else")

    def ended(*failures: tuple[str, Failure]) -> Failure | None:
        record = succeed(diamond(), "m")
        for task, failure in failures:
            record = transitions.give_up(
                happens(record, EventKind.FAILED, task, failure=failure), task, failure, now=4.0
            )
        return record.failure

    assert ended(("b", passing), ("a", wrong)) == ended(("a", wrong), ("b", passing)) == wrong
    alike = Failure(reason="OUT_OF_MEMORY", message="it may pass too")
    assert ended(("b", passing), ("a", alike)) == ended(("a", alike), ("b", passing)) == alike


def test_another_attempt_has_its_parameters_and_rule() -> None:
    record = happens(diamond(), EventKind.FAILED, "m", failure=OOPS)
    assert [task.id for task in transitions.undecided_tasks(record)] == ["m"]
    following = NextAttempt(rule="r", note="n", params={"text": "other"}, resources={"threads": 1}, warning="mind")
    record = transitions.retry(record, "m", following, now=3.0)
    attempt = record.task("m").attempt
    assert (attempt.number, attempt.rule, attempt.params, attempt.resources.threads) == (2, "r", {"text": "other"}, 1)
    assert record.warnings == ("mind",)


def test_an_attempt_elsewhere_avoids_every_worker_that_failed_for_this_reason() -> None:
    record = diamond()
    full, other = Failure(reason="DISK_FULL", message="full"), Failure(reason="STAGE_KILLED", message="killed")
    following = NextAttempt(rule="r", note="", params={}, resources={}, elsewhere=True, wait_seconds=30.0)
    for worker, failure in (("w1", full), ("w2", other), ("w3", full)):
        record = happens(record, EventKind.LEASED, "m", worker=worker)
        record = transitions.retry(happens(record, EventKind.FAILED, "m", failure=failure), "m", following, now=3.0)
    attempt = record.task("m").attempt
    assert (attempt.avoid, attempt.not_before) == (("w1", "w3"), 33.0)
    again = transitions.retry(happens(record, EventKind.FAILED, "m", failure=OOPS), "m",
                        NextAttempt(rule="r", note="", params={}, resources={}), now=4.0)  # fmt: skip
    assert (again.task("m").attempt.avoid, again.task("m").attempt.not_before) == ((), 0.0)


def test_events_of_an_earlier_attempt_change_nothing() -> None:
    record = happens(diamond(), EventKind.FAILED, "m", failure=OOPS)
    record = transitions.retry(record, "m", NextAttempt(rule="r", note="", params={}, resources={}), now=3.0)
    late = Event(kind=EventKind.SUCCEEDED, time=9.0, task="m", attempt=1, outputs={"out": "sha256:old"})
    assert transitions.apply(record, late) == record


def test_a_lost_lease_queues_the_same_attempt_again() -> None:
    record = happens(diamond(), EventKind.LEASED, "m", worker="w", epoch=1)
    record = happens(record, EventKind.LEASE_LOST, "m")
    assert (record.task("m").state, len(record.task("m").attempts)) == (TaskState.QUEUED, 1)
    for _ in range(2):  # leased again, and adopted by another coordinator
        record = happens(record, EventKind.LEASED, "m", worker="other", epoch=9)
        assert (record.task("m").attempt.epoch, record.task("m").attempt.lost_epoch) == (9, 1)


def test_cancelling_waits_for_what_runs() -> None:
    record = happens(succeed(diamond(), "m"), EventKind.LEASED, "a", worker="w")
    record = happens(record, EventKind.CANCEL_REQUESTED)
    assert states(record) == "m:succeeded a:running a2:cancelled b:cancelled v:cancelled"
    assert record.state is ExportState.CANCELLING
    record = happens(record, EventKind.CANCELLED, "a")
    assert record.state is ExportState.CANCELLED


def test_a_worker_that_shuts_down_hands_its_task_back() -> None:
    record = happens(diamond(), EventKind.LEASED, "m", worker="w")
    record = happens(record, EventKind.CANCELLED, "m")
    assert record.task("m").state is TaskState.QUEUED


def lose(record: ExportRecord, *, epoch: int, departed: bool = False) -> ExportRecord:
    leased = happens(record, EventKind.LEASED, "m", worker=f"w{epoch}", epoch=epoch)
    return happens(leased, EventKind.LEASE_LOST, "m", departed=departed)


def test_what_takes_every_worker_with_it_has_failed() -> None:
    record = diamond()
    for epoch in range(1, transitions.MOST_LOSSES):
        record = lose(record, epoch=epoch)
        assert record.task("m").attempt.state is TaskState.QUEUED
        assert happens(record, EventKind.LEASE_LOST, "m") == record  # told again by the next coordinator
    record = lose(record, epoch=transitions.MOST_LOSSES)
    (failed,) = transitions.undecided_tasks(record)
    assert failed.attempt.failure is not None
    assert failed.attempt.failure.reason == "STAGE_KILLED"
    assert f"the last one w{transitions.MOST_LOSSES}" in failed.attempt.failure.message
    again = transitions.retry(record, "m", NextAttempt(rule="r", note="", params={}, resources={}), now=3.0)
    assert again.task("m").attempt.losses == 0


def test_workers_that_were_told_to_end_are_no_reason_to_fail_before_there_are_very_many() -> None:
    record = diamond()
    for epoch in range(1, transitions.MOST_DEPARTURES):
        record = lose(record, epoch=epoch, departed=True)
        assert record.task("m").attempt.state is TaskState.QUEUED
    assert transitions.MOST_DEPARTURES > 5 * transitions.MOST_LOSSES
    record = lose(record, epoch=transitions.MOST_DEPARTURES)  # one that crashed is not one of them
    assert record.task("m").attempt.state is TaskState.QUEUED
    record = lose(record, epoch=transitions.MOST_DEPARTURES + 1, departed=True)
    (failed,) = transitions.undecided_tasks(record)
    assert failed.attempt.failure is not None
    assert failed.attempt.failure.reason == "STAGE_KILLED"


def test_a_worker_that_comes_back_to_its_task_was_not_lost() -> None:
    record = happens(diamond(), EventKind.LEASED, "m", worker="w", epoch=1)
    for _ in range(2 * transitions.MOST_LOSSES):
        record = happens(record, EventKind.LEASE_LOST, "m")
        record = happens(record, EventKind.LEASED, "m", worker="w", epoch=1)
        assert record.task("m").attempt.state is TaskState.RUNNING


def test_a_lost_input_is_made_again_and_its_reader_goes_on() -> None:
    lost = Failure(reason="ARTIFACT_NOT_FOUND", message="gone", about={"digest": "sha256:m"})
    record = happens(succeed(diamond(), "m"), EventKind.FAILED, "a", failure=lost)
    again = NextAttempt(rule="inputs-again", note="", params={}, resources={}, remake_inputs=True)
    record = transitions.retry(record, "a", again, now=3.0)
    assert states(record) == "m:queued a:waiting a2:waiting b:queued v:waiting"
    record = succeed(record, "m")
    assert (record.task("a").state, len(record.task("a").attempts)) == (TaskState.QUEUED, 2)


def test_a_retry_keeps_what_is_finished_and_remakes_what_follows_from_it() -> None:
    record = succeed(fail(succeed(diamond(), "m"), "a"), "b", "v")
    record = transitions.restart(record)
    assert states(record) == "m:succeeded a:waiting a2:waiting b:succeeded v:waiting"
    record = succeed(transitions.begin(record, now=5.0), "a", "a2", "v")
    assert record.state is ExportState.SUCCEEDED
    assert [attempt.run for attempt in record.task("a").attempts] == [1, 2]


kinds = st.sampled_from(list(EventKind))
happenings = st.lists(
    st.tuples(kinds, st.sampled_from(["m", "a", "a2", "b", "v"]), st.integers(1, 3), st.booleans()), max_size=40
)


@settings(max_examples=150, deadline=None)
@given(happenings=happenings)
def test_no_order_of_events_breaks_an_export(happenings: list[tuple[EventKind, str, int, bool]]) -> None:
    record = diamond()
    for kind, task, attempt, again in happenings:
        failure = OOPS if kind is EventKind.FAILED else None
        event = Event(kind=kind, time=2.0, task=task, attempt=attempt, outputs={"out": "sha256:o"}, failure=failure)
        record = transitions.apply(record, event)
        for undecided in transitions.undecided_tasks(record):
            if again and record.state is ExportState.RUNNING and len(undecided.attempts) < 3:
                following = NextAttempt(rule="r", note="", params={}, resources={})
                record = transitions.retry(record, undecided.id, following, now=3.0)
            else:
                record = transitions.give_up(record, undecided.id, OOPS, now=3.0)
        assert record.state.ended == all(task.state.ended for task in record.tasks)
        assert ExportRecord.from_json(record.to_json()) == record


def validated() -> ExportRecord:
    """A base that is prepared, two outputs made with it, and a validation over base and outputs."""
    tasks = (
        tiny_task("base").with_(format=""),
        tiny_task("a", needs=("base",)),
        tiny_task("b", needs=("base",)),
        tiny_task("v", needs=("base", "a", "b"), partial=True),
    )
    return transitions.begin(tiny_export("x", *tasks), now=1.0)


def test_a_validation_over_no_output_hides_no_reason() -> None:
    record = fail(fail(succeed(validated(), "base"), "a"), "b")
    assert states(record) == "base:succeeded a:failed b:failed v:skipped"
    assert (record.state, record.failure) == (ExportState.FAILED, OOPS)
    record = succeed(fail(succeed(validated(), "base"), "a"), "b")
    assert record.task("v").attempt.inputs == {"from-base": "sha256:base", "from-b": "sha256:b"}


def test_a_validation_is_not_begun_without_what_it_always_needs() -> None:
    """The base was lost while an output was made, and cannot be made again."""
    record = succeed(validated(), "base", "a")
    record = happens(happens(record, EventKind.LEASED, "b", worker="w"), EventKind.FAILED, "b", failure=OOPS)
    following = NextAttempt(rule="r", note="", params={}, resources={}, remake_inputs=True)
    record = fail(transitions.retry(record, "b", following, now=3.0), "base")
    assert states(record) == "base:failed a:succeeded b:skipped v:skipped"
    assert (record.state, record.failure) == (ExportState.FAILED, OOPS)


def test_an_export_that_a_fault_stopped_can_be_retried() -> None:
    before = happens(succeed(diamond(), "m"), EventKind.LEASED, "b", worker="w")
    record = transitions.stop(before, OOPS, now=5.0)
    assert states(record) == "m:succeeded a:cancelled a2:cancelled b:cancelled v:cancelled"
    assert (record.state, record.failure, record.end_time) == (ExportState.FAILED, OOPS, 5.0)
    assert all(attempt.state.ended for task in record.tasks for attempt in task.attempts)
    as_it_was = before.with_(state=ExportState.FAILED, failure=OOPS)  # by a version that left its tasks
    for ended in (record, as_it_was):
        again = transitions.begin(transitions.restart(ended), now=6.0)
        assert states(again) == "m:succeeded a:queued a2:waiting b:queued v:waiting"
        assert succeed(again, "a", "a2", "b", "v").state is ExportState.SUCCEEDED


def calibrated() -> ExportRecord:
    """merge; the text of a calibration and the calibration, which the level can do without; the level."""
    tasks = (
        tiny_task("m"),
        tiny_task("text", needs=("m",)).with_(fallback="it is rounded", format=""),
        tiny_task("c", needs=("m", "text")).with_(fallback="it is rounded", format=""),
        tiny_task("q", needs=("m", "c")),
    )
    return transitions.begin(tiny_export("x", *tasks), now=1.0)


def test_a_task_with_a_fallback_may_fail() -> None:
    record = fail(succeed(calibrated(), "m", "text"), "c")
    assert record.task("q").attempt.inputs == {"from-m": "sha256:m"}
    record = succeed(record, "q")
    assert (record.state, record.failure, list(record.outputs)) == (ExportState.SUCCEEDED, None, ["m", "q"])
    assert record.warnings == ("c: it failed, so it is rounded (STAGE_ERROR: oops)",)


def referenced() -> ExportRecord:
    """merge, an output of it, the reference, which needs no merge, and the validation of the output against it."""
    tasks = (
        tiny_task("m").with_(format=""),
        tiny_task("r").with_(format=""),
        tiny_task("o", needs=("m",)),
        tiny_task("v", needs=("r", "o"), partial=True),
    )
    return transitions.begin(tiny_export("x", *tasks), now=1.0)


def test_a_queued_task_that_nobody_needs_any_more_is_skipped() -> None:
    record = fail(referenced(), "m")
    assert states(record) == "m:failed r:skipped o:skipped v:skipped"
    assert (record.state, record.failure) == (ExportState.FAILED, OOPS)
    assert record.task("r").attempt.state is TaskState.CANCELLED
    late = happens(record, EventKind.SUCCEEDED, "r", outputs={"out": "sha256:r"})
    assert late == record
    again = succeed(transitions.begin(transitions.restart(record), now=6.0), "m", "r", "o", "v")
    assert again.state is ExportState.SUCCEEDED


def test_a_running_task_that_nobody_needs_any_more_ends_before_the_export() -> None:
    record = happens(referenced(), EventKind.LEASED, "r", worker="w")
    record = fail(record, "m")
    assert states(record) == "m:failed r:running o:skipped v:skipped"
    assert happens(record, EventKind.SUCCEEDED, "r", outputs={"out": "sha256:r"}).state is ExportState.FAILED
    handed_back = happens(record, EventKind.LEASE_LOST, "r")
    assert states(handed_back) == "m:failed r:skipped o:skipped v:skipped"


def test_a_task_with_a_fallback_needs_all_its_own_inputs() -> None:
    record = fail(succeed(calibrated(), "m"), "text")
    assert states(record) == "m:succeeded text:failed c:skipped q:queued"
    assert succeed(record, "q").state is ExportState.SUCCEEDED


def test_a_task_without_a_fallback_takes_those_that_need_it_with_it() -> None:
    record = calibrated()
    record = fail(succeed(record.with_task(record.task("text").with_(fallback="")), "m"), "text")
    assert states(record) == "m:succeeded text:failed c:skipped q:skipped"
    assert (record.state, record.failure) == (ExportState.FAILED, OOPS)


def test_a_task_with_a_fallback_does_not_hide_the_failure_of_another() -> None:
    record = fail(fail(succeed(calibrated(), "m", "text"), "c"), "q")
    assert (record.state, record.failure) == (ExportState.FAILED, OOPS)
    again = transitions.restart(record)
    assert states(again) == "m:succeeded text:succeeded c:waiting q:waiting"
