"""Decide the next attempt after a failure: a pure function over an ordered table of rules, which the operator may replace.

A rule names the stages, reasons and conditions it applies to, and what the next attempt changes. The first rule that applies and
leads to something not tried yet is taken. If there is none, the failure is final and gets step-by-step guidance from the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from slipway.errors import ConfigurationError, Failure
from slipway.files.yaml_files import YamlError, load_document
from slipway.reasons import REASONS
from slipway_coordinator.model.records import AttemptRecord, Resources

DEFAULT_RULES = Path(__file__).with_name("recovery.yaml")

_LARGE_MODEL_BYTES = 16 << 30
_SMALL_MODEL_BYTES = 2 << 30


class Profile(StrEnum):
    """The caution with which recovery chooses the next attempt."""

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Condition(_Model):
    """A condition on one value; every given part must hold. A missing value fails ``min`` and ``max``."""

    any_of: tuple[Any, ...] | None = Field(default=None, alias="in")
    none_of: tuple[Any, ...] | None = Field(default=None, alias="not_in")
    min: float | None = None
    max: float | None = None

    def holds(self, value: Any) -> bool:
        """Return whether ``value`` meets the condition; a number written as text counts as a number."""
        if self.any_of is not None and value not in self.any_of:
            return False
        if self.none_of is not None and value in self.none_of:
            return False
        if self.min is None and self.max is None:
            return True
        try:
            number = float(value)
        except (TypeError, ValueError):
            return False
        return (self.min is None or number >= self.min) and (self.max is None or number <= self.max)


class ResourceChange(_Model):
    """Change of an attempt's resources: factors multiply those of the attempt before, the other fields replace them."""

    memory_factor: float = Field(default=1.0, gt=0, le=1)
    timeout_factor: float = Field(default=1.0, ge=1)
    threads: int | None = Field(default=None, ge=1)
    exclusive: bool | None = None


class Rule(_Model):
    """One row of the table.

    Attributes:
        name: Recorded with the attempt it leads to.
        stages: Stages it applies to; empty for all.
        reasons: Reasons it applies to.
        profiles: Profiles it applies to.
        when: Conditions on values by path: ``params.NAME``, ``about.NAME`` (of the failure), ``facts.NAME`` (of the model).
        set: Parameters that the next attempt changes.
        resources: Resources of the next attempt.
        repeat: Allow the same attempt again, because the cause may pass by itself.
        wait_seconds: Delay of the next attempt; doubled each time the rule is applied to the same task again.
        elsewhere: Prefer other workers than those where the task failed for this reason; these take it again only after
            ``wait_seconds`` and if there are no others. Ignored inside one process.
        remake_inputs: Make the inputs again first.
        limit: How often it is applied to one task.
        say: Its effect, described for people.
        warn: A result that differs from the user's request; added to the export's warnings.
    """

    name: str
    stages: tuple[str, ...] = ()
    reasons: tuple[str, ...]
    profiles: tuple[Profile, ...] = tuple(Profile)
    when: dict[str, Condition] = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    resources: ResourceChange = ResourceChange()
    repeat: bool = False
    wait_seconds: float = Field(default=0.0, ge=0)
    elsewhere: bool = False
    remake_inputs: bool = False
    limit: int = Field(default=1, ge=1)
    say: str
    warn: str = ""

    @pydantic.field_validator("reasons")
    @classmethod
    def _known(cls, reasons: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(reasons) - set(REASONS))
        if unknown:
            raise ValueError(f"unknown reason {', '.join(unknown)}")
        return reasons

    @pydantic.field_validator("when")
    @classmethod
    def _paths(cls, when: dict[str, Condition]) -> dict[str, Condition]:
        for path in when:
            if path.partition(".")[0] not in {"params", "about", "facts"} or "." not in path:
                raise ValueError(f"{path} is not a path: begin it with params., about. or facts.")
        return when


class RuleTable(_Model):
    """All rules in order, and steps for people by reason, for failures that no rule handles; ``default`` is for other reasons."""

    rules: tuple[Rule, ...]
    guidance: dict[str, tuple[str, ...]]

    @pydantic.model_validator(mode="after")
    def _sound(self) -> RuleTable:
        names = [rule.name for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"rules with the same name: {', '.join(twice)}")
        unknown = sorted(set(self.guidance) - set(REASONS) - {"default"})
        if unknown:
            raise ValueError(f"guidance for unknown reason {', '.join(unknown)}")
        if "default" not in self.guidance:
            raise ValueError("guidance lacks default")
        return self


class NextAttempt(_Model):
    """The next attempt of a task that failed."""

    rule: str
    note: str
    params: dict[str, Any]
    resources: Resources
    wait_seconds: float = 0.0
    elsewhere: bool = False
    remake_inputs: bool = False
    warning: str = ""


def load_rules(path: Path = DEFAULT_RULES) -> RuleTable:
    """Read and check a table.

    Raises:
        ConfigurationError: reason ``CONFIGURATION_NOT_FOUND`` or ``CONFIGURATION_INVALID``.
    """
    try:
        return RuleTable.model_validate(load_document(path))
    except OSError as error:
        raise ConfigurationError(
            f"the recovery rules {path} cannot be read: {error.strerror}", reason="CONFIGURATION_NOT_FOUND"
        ) from error
    except (YamlError, pydantic.ValidationError) as error:
        raise ConfigurationError(
            f"the recovery rules {path} are not valid: {error}", remedy=f"compare them with {DEFAULT_RULES}"
        ) from error


@cache
def default_rules() -> RuleTable:
    """Return the built-in table."""
    return load_rules()


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
        table: Rules; the built-in ones when not given.
    """
    table = table or default_rules()
    if len(history) >= max_attempts:
        return None
    values = {"params": params, "about": failure.about, "facts": facts}
    for rule in table.rules:
        if not _applies(rule, failure, stage, profile=profile, values=values) or (rule.elsewhere and alone):
            continue
        applied = sum(attempt.rule == rule.name for attempt in history)
        if applied >= rule.limit:
            continue
        found = _attempt(rule, params, history[-1].resources if history else Resources(), applied=applied)
        tried = any(attempt.params == found.params and attempt.resources == found.resources for attempt in history)
        if rule.repeat or rule.elsewhere or rule.remake_inputs or not tried:
            return found
    return None


def _applies(
    rule: Rule, failure: Failure, stage: str, *, profile: Profile, values: Mapping[str, Mapping[str, Any]]
) -> bool:
    if failure.reason not in rule.reasons or profile not in rule.profiles or (rule.stages and stage not in rule.stages):
        return False
    for path, condition in rule.when.items():
        kind, _, name = path.partition(".")
        if not condition.holds(values[kind].get(name)):
            return False
    return True


def _attempt(rule: Rule, params: Mapping[str, Any], before: Resources, *, applied: int) -> NextAttempt:
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
        warning=rule.warn,
    )


def with_guidance(failure: Failure, stage: str, *, attempts: int, table: RuleTable | None = None) -> Failure:
    """Add steps that a person can take to a final failure's remedy and as ``about.guidance``.

    The default steps are added only to a failure without a remedy of its own. ``{stage}`` in a step stands for the stage.
    """
    table = table or default_rules()
    if failure.remedy and failure.reason not in table.guidance:
        return failure
    steps = [step.replace("{stage}", stage) for step in table.guidance.get(failure.reason, table.guidance["default"])]
    text = " ".join(f"({number}) {step}" for number, step in enumerate(steps, start=1))
    tried = f"after {attempts} attempts, by hand: " if attempts > 1 else "by hand: "
    remedy = f"{failure.remedy}; {tried}{text}" if failure.remedy else f"{tried}{text}"
    return replace(failure, remedy=remedy, about={**failure.about, "guidance": "\n".join(steps)})
