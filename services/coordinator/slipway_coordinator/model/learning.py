"""Learn from a task's attempts what to begin with next time. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slipway.counts import counted
from slipway.errors import Failure
from slipway.planning.precedents import PRECEDENT, Precedent
from slipway.reasons import REASONS, Category
from slipway_coordinator.model.records import AttemptRecord, Resources, TaskRecord
from slipway_coordinator.model.recovery import NextAttempt
from slipway_coordinator.model.rules import RuleTable
from slipway_coordinator.model.states import TaskState

AS_PLANNED = "precedent-does-not-fit"
"""Name of the rule by which a task begins as planned after its precedent has failed."""

_OF_THE_MODEL = (Category.UNSUPPORTED, Category.VALIDATION, Category.INVALID_INPUT)


def lasting(failure: Failure | None) -> bool:
    """Return whether a failure is due to the model and the parameters, so that the same attempt would fail again."""
    reason = REASONS.get(failure.reason) if failure else None
    return reason is not None and not reason.retryable and reason.category in _OF_THE_MODEL


def lesson(task: TaskRecord, *, rules: RuleTable, warnings: Sequence[str]) -> Precedent | None:
    """Return what a task that has succeeded teaches; None for nothing new.

    A failure that may pass (no memory, a lost worker) teaches nothing, nor does a success with other resources, or one for which a
    parameter had to change that the configuration had set.

    Args:
        task: The task.
        rules: Rules of its recovery; those that led to the success may have warnings.
        warnings: Warnings of the export.
    """
    attempts = [attempt for attempt in task.attempts if attempt.run == task.attempt.run]
    failed, last = attempts[:-1], attempts[-1]
    if not task.precedent or not failed or last.state is not TaskState.SUCCEEDED:
        return None
    changed = {name for name in {*task.params, *last.params} if task.params.get(name) != last.params.get(name)}
    if last.resources != Resources() or not changed <= set(task.open) or not all(lasting(a.failure) for a in failed):
        return None
    applied = {attempt.rule for attempt in attempts}
    return Precedent(
        params={name: last.params.get(name) for name in task.open},
        because=_described(failed) if changed else "",
        warnings=tuple(
            rule.warn for rule in rules.rules if rule.name in applied and rule.warn in warnings and rule.warn
        ),
    )


def as_planned(task: TaskRecord, *, rules: RuleTable) -> NextAttempt:
    """Return the attempt after that of a precedent that fails: the task begins as planned."""
    return NextAttempt(
        rule=AS_PLANNED,
        note="what worked before fails for this model, so the task begins as planned",
        params=task.params,
        resources=task.attempt.resources,
        withdrawn=tuple(rule.warn for rule in rules.rules if rule.warn and task.stage in rule.stages),
    )


def _described(failed: Sequence[AttemptRecord]) -> str:
    counts = Counter(
        str(attempt.failure.about.get("engine", attempt.failure.reason))
        for attempt in failed
        if attempt.failure is not None and attempt.rule != PRECEDENT
    )
    return ", ".join(f"{name} failed {counted(count, 'time')}" for name, count in counts.items())
