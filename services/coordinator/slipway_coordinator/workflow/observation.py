"""Spans and metrics of exports, derived from changes of their records.

A workflow is replayed after a crash, and so are its changes. Spans are written every time, with ids and times derived from the
record: the next coordinator sends those that a crash kept from being sent, and repeats the others unchanged. Metrics count a
change only the first time. No span stays open in the coordinator: those of an attempt and of an export are written at their end;
other spans refer to them earlier by the ids they will have.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slipway.errors import Failure
from slipway.observability import metrics, telemetry
from slipway.planning.references import AttemptKey
from slipway_coordinator.lifecycle.quotas import ProjectUsage
from slipway_coordinator.lifecycle.records import AttemptRecord, ExportRecord, TaskRecord, TaskState

if TYPE_CHECKING:
    from slipway_coordinator.broker.board import Board

log = logging.getLogger("slipway.coordinator")


def export_span(record: ExportRecord) -> str:
    """Return the span of a run of an export."""
    return telemetry.derive_span(record.traceparent, record.name, record.run)


def attempt_span(traceparent: str, key: AttemptKey, epoch: int) -> str:
    """Return the span of an attempt under one lease; it is the parent of the worker's spans.

    Args:
        traceparent: That of the export.
        key: Name of the attempt.
        epoch: Epoch of the lease.
    """
    return telemetry.derive_span(traceparent, key, epoch)


def observe(before: ExportRecord | None, after: ExportRecord, *, at: float, news: bool) -> None:
    """Write the spans and metrics of a change of an export.

    Args:
        before: The record before; None at the beginning of a run.
        after: The record now.
        at: Time of the change in seconds since the epoch; a replay gives the same.
        news: Whether the change is not a replayed one.
    """
    _observe_export(before, after, news=news)
    for task in after.tasks:
        known = () if before is None else before.tasks  # it lacks the tasks that are planned after an import
        old = next((one.attempts for one in known if one.id == task.id), None)
        for attempt in task.attempts:
            if attempt.run == after.run:
                earlier = next((one for one in old or () if one.number == attempt.number), None)
                _observe_attempt(after, task, earlier, attempt, at=at, news=news)


def log_failures(before: ExportRecord | None, after: ExportRecord) -> None:
    """Write one log line for each attempt that a change ended as failed, with what recovery decided."""
    known = {} if before is None else {task.id: task for task in before.tasks}
    for task in after.tasks:
        old = {one.number: one.state for one in known[task.id].attempts} if task.id in known else {}
        for attempt in task.attempts:
            if attempt.state is not TaskState.FAILED or old.get(attempt.number) is TaskState.FAILED:
                continue
            failure = attempt.failure or Failure(reason="INTERNAL", message="")
            with telemetry.within(after.traceparent):
                log.info(
                    f"{after.name}: attempt {attempt.number} of {task.id} ({task.stage}) failed with {failure.reason}: "
                    f"{_describe_decision(task, attempt)}"
                )


def _describe_decision(task: TaskRecord, failed: AttemptRecord) -> str:
    """Describe what recovery decided about a failed attempt."""
    following = next((one for one in task.attempts if one.number > failed.number), None)
    if following is not None:
        why = ", ".join(filter(None, (following.rule, following.note)))
        return f"attempt {following.number} follows" + (f" ({why})" if why else "")
    return "its inputs are made again first" if task.state is TaskState.WAITING else "nothing else is tried"


class Gauges:
    """Gauges of waiting and running tasks and of workers, by stage, and of what projects have. One that was seen once stays, with zero.

    Args:
        board: The source of the figures.
        active: Returns whether this coordinator is active.
        usage: Returns what each project used at the last look.
    """

    def __init__(
        self,
        board: Board,
        active: Callable[[], bool],
        usage: Callable[[], Mapping[str, ProjectUsage]] = dict,
    ) -> None:
        self._board = board
        self._active = active
        self._usage = usage
        self._seen: set[str] = set()
        self._projects: set[str] = set()

    def __call__(self) -> Iterator[metrics.Sample]:
        """Yield the samples of this moment. Safe from any thread."""
        yield metrics.ACTIVE, {}, float(self._active())
        load = self._board.load()
        waits = {stage: [wait for other, wait in load.waiting if other == stage] for stage, _ in load.waiting}
        leased, workers = Counter(load.leased), Counter(load.served)
        self._seen.update(waits, leased, workers)
        for stage in sorted(self._seen):
            labels = {"stage": stage}
            yield metrics.QUEUE_TASKS, labels, len(waits.get(stage, ()))
            yield metrics.QUEUE_AGE, labels, max(waits.get(stage, ()), default=0.0)
            yield metrics.LEASED_TASKS, labels, leased[stage]
            yield metrics.WORKERS, labels, workers[stage]
        yield from self._of_projects()

    def _of_projects(self) -> Iterator[metrics.Sample]:
        load = self._board.load_by_project()
        stored, unmeasured, seconds = Counter[str](), Counter[str](), defaultdict[str, float](float)
        label = self._board.projects().label
        for project, usage in self._usage().items():
            stored[label(project)] += usage.stored_bytes
            unmeasured[label(project)] += usage.unmeasured_artifacts
            seconds[label(project)] += usage.gpu_seconds
        self._projects.update(load.waiting, load.running, load.exports, stored, seconds)
        for project in sorted(self._projects):
            yield metrics.PROJECT_TASKS, {"project": project, "state": "waiting"}, load.waiting.get(project, 0)
            yield metrics.PROJECT_TASKS, {"project": project, "state": "running"}, load.running.get(project, 0)
            yield metrics.PROJECT_EXPORTS, {"project": project}, load.exports.get(project, 0)
            yield metrics.PROJECT_STORED_BYTES, {"project": project}, stored[project]
            yield metrics.PROJECT_UNMEASURED_ARTIFACTS, {"project": project}, unmeasured[project]
            yield metrics.PROJECT_GPU_SECONDS, {"project": project}, seconds[project]


def _observe_export(before: ExportRecord | None, after: ExportRecord, *, news: bool) -> None:
    identity, facts = export_span(after), {"slipway.export": after.name, "slipway.run": after.run}
    began = after.begin_time or after.create_time
    if before is None:
        retried = (telemetry.derive_span(after.traceparent, after.name, after.run - 1),) if after.run > 1 else ()
        _write_point(
            "export created" if after.run == 1 else "export retried",
            began,
            facts,
            parent=identity,
            links=retried,
        )
        if news:
            metrics.EXPORTS_CREATED.add()
    if not after.state.ended or (before is not None and before.state.ended):
        return
    end = after.end_time or began
    facts |= {"slipway.state": after.state.value}
    _write_point("export ended", end, facts, parent=identity)
    telemetry.record(
        "export run",
        kind="server",
        identity=identity,
        parent=after.traceparent,
        start=began,
        end=end,
        attributes=facts,
        failure=_failure(after.failure),
    )
    if news:
        metrics.EXPORTS_ENDED.add(state=after.state.value)
        metrics.EXPORT_SECONDS.observe(end - began, traceparent=identity, state=after.state.value)


def _observe_attempt(
    record: ExportRecord, task: TaskRecord, old: AttemptRecord | None, new: AttemptRecord, *, at: float, news: bool
) -> None:
    if old is None and new.rule and new.number > 1 and news:  # the first begins with a precedent
        metrics.RETRIES.add(stage=task.stage, rule=new.rule)
    granted = new.state is TaskState.RUNNING and (old is None or old.epoch != new.epoch)
    left = old is not None and old.state is TaskState.RUNNING and new.state is TaskState.QUEUED
    ended = new.state.ended and new.start_time is not None and (old is None or not old.state.ended)
    if not (granted or left or ended):
        return
    identity = attempt_span(record.traceparent, _key(record, task, new), new.epoch)
    facts: dict[str, Any] = {
        "slipway.task": task.id,
        "slipway.stage": task.stage,
        "slipway.attempt": new.number,
        "slipway.lease_epoch": new.epoch,
        "slipway.worker": new.worker,
        "slipway.rule": new.rule,
    }
    if granted:
        _write_point(f"{task.stage} granted", at, facts, parent=identity)
        return
    state = "taken back" if left else new.state.value
    facts |= {"slipway.state": state, "slipway.reused": new.reused}
    end = at if left else (new.end_time or at)
    start = min(new.start_time or end, end)
    telemetry.record(
        f"{task.stage} attempt",
        kind="producer",  # it is offered, and a worker takes it
        identity=identity,
        parent=export_span(record),
        start=start,
        end=end,
        attributes=facts,
        links=_attempt_before(record, task, new),
        failure=_failure(new.failure) or (("LEASE_LOST", "its worker was silent or handed it back") if left else None),
    )
    _write_point(f"{task.stage} {state}", end, facts, parent=identity)
    if news:
        reason = new.failure.reason if new.failure is not None and not left else ""
        metrics.ATTEMPTS.add(stage=task.stage, state=state.replace(" ", "_"), reason=reason)
        metrics.ATTEMPT_SECONDS.observe(
            end - start, traceparent=identity, stage=task.stage, state=state.replace(" ", "_")
        )


def _attempt_before(record: ExportRecord, task: TaskRecord, attempt: AttemptRecord) -> tuple[str, ...]:
    """Return the span that a retry links to: the same attempt under the lease before, or the attempt before."""
    if attempt.lost_epoch:
        return (attempt_span(record.traceparent, _key(record, task, attempt), attempt.lost_epoch),)
    before = next((one for one in task.attempts if one.number == attempt.number - 1), None)
    return () if before is None else (attempt_span(record.traceparent, _key(record, task, before), before.epoch),)


def _write_point(name: str, at: float, facts: dict[str, Any], *, parent: str, links: tuple[str, ...] = ()) -> None:
    """Write a span of zero length for a transition."""
    identity = telemetry.derive_span(parent, parent, name, at)
    telemetry.record(name, identity=identity, parent=parent, start=at, end=at, attributes=facts, links=links)


def _key(record: ExportRecord, task: TaskRecord, attempt: AttemptRecord) -> AttemptKey:
    return AttemptKey.of(record.name, task.id, attempt.number)


def _failure(failure: Failure | None) -> tuple[str, str] | None:
    return None if failure is None else (failure.reason, failure.message)
