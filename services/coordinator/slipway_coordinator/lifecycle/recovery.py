"""Decide the next attempt after a failure, and learn what to begin with next time: pure functions over an ordered table of rules.

The first rule that applies and leads to something not tried yet is taken. If there is none, the failure is final and gets
step-by-step guidance from the table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from slipway.division import is_join
from slipway.errors import Failure
from slipway.planning.precedents import PRECEDENT, Precedent
from slipway.reasons import REASONS, Category
from slipway.texts import counted
from slipway_coordinator.lifecycle.records import AttemptRecord, Resources, TaskRecord, TaskState
from slipway_coordinator.lifecycle.rules import Profile, Rule, RuleTable, default_rules

_NAME = re.compile(r"\{(\w+)\}")
_LARGE_MODEL_BYTES = 16 << 30
_SMALL_MODEL_BYTES = 2 << 30

AS_PLANNED = "precedent-does-not-fit"
"""Name of the rule by which a task begins as planned after its precedent has failed."""

_LASTING_CATEGORIES = (Category.UNSUPPORTED, Category.VALIDATION, Category.INVALID_INPUT)


class NextAttempt(BaseModel):
    """The next attempt of a task that failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: str
    note: str
    params: dict[str, Any]
    resources: Resources
    wait_seconds: float = 0.0
    elsewhere: bool = False
    remake_inputs: bool = False
    whole: bool = False
    warning: str = ""
    without: tuple[str, ...] = ()
    reserve: tuple[str, ...] = ()
    """Inputs that the plan keeps in reserve, and that this attempt has."""
    format: str = ""
    """Format under which the output is delivered from then on; empty for no change."""
    withdrawn: tuple[str, ...] = ()
    """Warnings of earlier rules whose effect this attempt undoes."""


def choose_profile(configured: str, *, model_bytes: int, history: Sequence[AttemptRecord]) -> Profile:
    """Choose the profile: the configured one or, for ``auto``, one by the model's size and the attempts so far.

    Conservative for large models and for exports that ran out of memory more than once; aggressive for small models that
    never did, because their attempts are cheap; otherwise balanced.

    Args:
        configured: ``auto`` or a profile's name.
        model_bytes: Size of the merged model; 0 while unknown.
        history: All attempts of the export so far, including the one that failed.
    """
    if configured != "auto":
        return Profile(configured)
    shortages = sum(attempt.failure is not None and attempt.failure.reason == "OUT_OF_MEMORY" for attempt in history)
    if model_bytes >= _LARGE_MODEL_BYTES or shortages > 1:
        return Profile.CONSERVATIVE
    if 0 < model_bytes < _SMALL_MODEL_BYTES and not shortages:
        return Profile.AGGRESSIVE
    return Profile.BALANCED


def recover(
    failure: Failure,
    stage: str,
    *,
    params: Mapping[str, Any],
    history: Sequence[AttemptRecord],
    profile: Profile,
    facts: Mapping[str, Any],
    max_attempts: int,
    alone: bool = False,
    reserve: Collection[str] = (),
    delivers: Callable[[str], str] = lambda _level: "",
    table: RuleTable | None = None,
) -> NextAttempt | None:
    """Return the next attempt of a task, or None when its failure is final.

    Args:
        failure: Why the latest attempt failed.
        stage: The task's stage.
        params: Parameters of the latest attempt.
        history: Attempts of this task so far, the latest last.
        profile: How cautious to be.
        facts: What is known about the model (``model_bytes``, ``architecture`` …).
        max_attempts: Attempts the task may have in all.
        alone: There will only ever be one worker.
        reserve: Inputs that the plan keeps in reserve for the task.
        delivers: Function that returns the format of the task's output at another level; empty if it may not be delivered at that level.
        table: Rules; the built-in ones when not given.
    """
    table = table or default_rules()
    if len(history) >= max_attempts:
        return None
    first = history[0].params if history else params
    values = {
        "params": params,
        "first": first,
        "inputs": history[-1].inputs if history else {},
        "about": failure.about,
        "facts": facts,
        "earlier": _count_failures(history[:-1]),
    }
    for rule in table.rules:
        if not _applies(rule, failure, stage, profile=profile, values=values) or (rule.elsewhere and alone):
            continue
        applied = sum(attempt.rule == rule.name for attempt in history)
        if applied >= rule.limit:
            continue
        missing = set(rule.reserve) - set(values["inputs"])
        if rule.reserve and (not missing or not missing <= set(reserve)):
            continue
        if rule.whole and not is_join(params):
            continue
        delivered = delivers(rule.deliver) if rule.deliver else ""
        if rule.deliver and not delivered:
            continue
        restored = {**params, **{name: first[name] for name in rule.restore if name in first}}
        for name in set(rule.restore) - set(first):
            restored.pop(name, None)
        restored |= {name: failure.about.get(key, "").splitlines() for name, key in rule.take.items()}
        following = _next_attempt(rule, restored, history[-1].resources if history else Resources(), applied=applied)
        following = following.model_copy(update={"format": delivered})
        tried = any(
            attempt.params == following.params and attempt.resources == following.resources for attempt in history
        )
        if rule.repeat or rule.elsewhere or rule.remake_inputs or rule.whole or missing or not tried:
            return following.model_copy(update={"withdrawn": _withdrawn_warnings(following.params, history, table)})
    return None


def _applies(
    rule: Rule, failure: Failure, stage: str, *, profile: Profile, values: Mapping[str, Mapping[str, Any]]
) -> bool:
    if failure.reason not in rule.reasons or profile not in rule.profiles or (rule.stages and stage not in rule.stages):
        return False
    for path, condition in rule.when.items():
        kind, _, name = path.partition(".")
        value = values[kind].get(name, 0 if kind == "earlier" else None)
        if not condition.holds(value):
            return False
    return True


def _withdrawn_warnings(
    params: Mapping[str, Any], history: Sequence[AttemptRecord], table: RuleTable
) -> tuple[str, ...]:
    """Return the warnings of applied rules whose settings this attempt changes again."""
    applied = {attempt.rule for attempt in history}
    return tuple(
        rule.warn
        for rule in table.rules
        if rule.name in applied and any(params.get(name) != rule.set.get(name) for name in rule.warns_of)
    )


def _count_failures(history: Sequence[AttemptRecord]) -> Mapping[str, int]:
    """Count failed attempts by reason, and by reason with each value in ``about``."""
    failures = [attempt.failure for attempt in history if attempt.failure is not None]
    whole = (failure.reason for failure in failures)
    parts = (f"{failure.reason}.{value}" for failure in failures for value in set(failure.about.values()))
    return Counter((*whole, *parts))


def _next_attempt(rule: Rule, params: Mapping[str, Any], before: Resources, *, applied: int) -> NextAttempt:
    change = rule.resources
    resources = Resources(
        memory_factor=before.memory_factor * change.memory_factor,
        timeout_factor=before.timeout_factor * change.timeout_factor,
        threads=before.threads if change.threads is None else change.threads,
        exclusive=before.exclusive if change.exclusive is None else change.exclusive,
    )
    return NextAttempt(
        rule=rule.name,
        note=rule.say,
        params={**params, **rule.set},
        resources=resources,
        wait_seconds=rule.wait_seconds * 2**applied,
        elsewhere=rule.elsewhere,
        remake_inputs=rule.remake_inputs,
        whole=rule.whole,
        warning=rule.warn,
        without=rule.without,
        reserve=rule.reserve,
    )


def with_guidance(failure: Failure, stage: str, *, attempts: int, table: RuleTable | None = None) -> Failure:
    """Add steps that a person can take to a final failure's remedy and as ``about.guidance``.

    The default steps are added only to a failure without a remedy of its own.
    """
    table = table or default_rules()
    known = table.guidance.get((stage, failure.reason)) or table.guidance.get(("", failure.reason))
    if failure.remedy and known is None:
        return failure
    values = {**failure.about, "stage": stage}
    wanted = known or table.guidance["", "default"]
    steps = [
        _NAME.sub(lambda match: values[match[1]], step) for step in wanted if set(_NAME.findall(step)) <= set(values)
    ]
    text = " ".join(f"({number}) {step}" for number, step in enumerate(steps, start=1))
    tried = f"after {attempts} attempts, by hand: " if attempts > 1 else "by hand: "
    remedy = f"{failure.remedy}; {tried}{text}" if failure.remedy else f"{tried}{text}"
    return replace(failure, remedy=remedy, about={**failure.about, "guidance": "\n".join(steps)})


def is_lasting(failure: Failure | None) -> bool:
    """Return whether the model or the parameters cause a failure, so that the same attempt would fail again."""
    reason = REASONS.get(failure.reason) if failure else None
    return reason is not None and not reason.retryable and reason.category in _LASTING_CATEGORIES


def lesson(task: TaskRecord, *, rules: RuleTable, warnings: Sequence[str]) -> Precedent | None:
    """Return the precedent that a successful task sets; None if it sets none.

    It sets none after a failure that may pass (no memory, a lost worker), after a success with other resources, or if a parameter had to
    change that the configuration sets.

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
    if last.resources != Resources() or not changed <= set(task.open) or not all(is_lasting(a.failure) for a in failed):
        return None
    applied = {attempt.rule for attempt in attempts}
    return Precedent(
        params={name: last.params.get(name) for name in task.open},
        because=_describe_failures(failed) if changed else "",
        warnings=tuple(
            rule.warn for rule in rules.rules if rule.name in applied and rule.warn in warnings and rule.warn
        ),
    )


def return_to_plan(task: TaskRecord, *, rules: RuleTable) -> NextAttempt:
    """Return the attempt that follows a failed precedent: the task begins as planned."""
    return NextAttempt(
        rule=AS_PLANNED,
        note="what worked before fails for this model, so the task begins as planned",
        params=task.params,
        resources=task.attempt.resources,
        withdrawn=tuple(rule.warn for rule in rules.rules if rule.warn and task.stage in rule.stages),
    )


def _describe_failures(failed: Sequence[AttemptRecord]) -> str:
    counts = Counter(
        str(attempt.failure.about.get("engine", attempt.failure.reason))
        for attempt in failed
        if attempt.failure is not None and attempt.rule != PRECEDENT
    )
    return ", ".join(f"{name} failed {counted(count, 'time')}" for name, count in counts.items())
