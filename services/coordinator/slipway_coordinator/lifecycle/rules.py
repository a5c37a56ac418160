"""The table of recovery rules: a YAML file that the operator may replace, and files of rules that stages bring themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from slipway.errors import ConfigurationError
from slipway.files.yaml_files import YamlError, load_document
from slipway.reasons import REASONS
from slipway.registry import known_stage, stage_names

DEFAULT_RULES = Path(__file__).with_name("recovery.yaml")

_MOST_PROBLEMS = 20


class Profile(StrEnum):
    """The caution with which recovery chooses the next attempt."""

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"


def _check_reason(reason: str) -> str:
    if reason not in REASONS:
        raise ValueError(f"unknown reason {reason}")
    return reason


Reason = Annotated[str, AfterValidator(_check_reason)]
Steps = tuple[str, ...]
"""What a person can do, step by step. ``{stage}`` stands for the stage that failed, and ``{NAME}`` for ``NAME`` in the failure's
``about``; a step with a name that the failure lacks is left out."""


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
        when: Conditions on values by path: ``params.NAME``, ``first.NAME`` (parameters of the first attempt), ``about.NAME`` (of the failure),
            ``facts.NAME`` (of the model), ``inputs.NAME`` (digest of an input of the attempt that failed), and ``earlier.REASON`` or ``earlier.REASON.VALUE`` (how many attempts before failed for this reason, or with such a value in
            ``about``).
        restore: Parameters that get the task's first value again, before ``set`` applies: another way to the requested result begins there.
        set: Parameters that the next attempt changes.
        take: Parameters that the next attempt takes from the failure's ``about``, as lists: one entry a line.
        without: Inputs that the next attempt leaves out; only for inputs that the stage does not need.
        reserve: Inputs that the plan keeps in reserve for the task and that the next attempt gets; the tasks that make them run first. The
            rule does not apply to a task without them, or whose last attempt had them.
        deliver: Level under whose name the output is delivered from then on. The rule does not apply if the plan delivers it already.
        resources: Resources of the next attempt.
        repeat: Allow the same attempt again, because the cause may pass by itself.
        wait_seconds: Delay of the next attempt; doubled each time the rule is applied to the same task again.
        elsewhere: Prefer other workers than those where the task failed for this reason; these take it again only after
            ``wait_seconds`` and if there are no others. Ignored inside one process.
        remake_inputs: Make the inputs again first.
        whole: Do divided work in one piece. The rule does not apply to other tasks than those that join parts.
        limit: How often it is applied to one task.
        say: Its effect, described for people.
        warn: A result that differs from the user's request; added to the export's warnings.
        warns_of: Parameters that the warning is about; it is withdrawn when a later attempt changes one of them again.
    """

    name: str
    stages: tuple[str, ...] = ()
    reasons: tuple[Reason, ...]
    profiles: tuple[Profile, ...] = tuple(Profile)
    when: dict[str, Condition] = Field(default_factory=dict)
    restore: tuple[str, ...] = ()
    set: dict[str, Any] = Field(default_factory=dict)
    take: dict[str, str] = Field(default_factory=dict)
    without: tuple[str, ...] = ()
    reserve: tuple[str, ...] = ()
    deliver: str = ""
    resources: ResourceChange = ResourceChange()
    repeat: bool = False
    wait_seconds: float = Field(default=0.0, ge=0)
    elsewhere: bool = False
    remake_inputs: bool = False
    whole: bool = False
    limit: int = Field(default=1, ge=1)
    say: str
    warn: str = ""
    warns_of: tuple[str, ...] = ()

    @pydantic.field_validator("when")
    @classmethod
    def _check_paths(cls, when: dict[str, Condition]) -> dict[str, Condition]:
        for path in when:
            kind, _, name = path.partition(".")
            if kind not in {"params", "first", "inputs", "about", "facts", "earlier"} or not name:
                raise ValueError(
                    f"{path} is not a path: begin it with params., first., inputs., about., facts. or earlier."
                )
            if kind == "earlier":
                _check_reason(name.partition(".")[0])
        return when


class _TableFile(_Model):
    """The file of a table. The row ``rules of the stage`` stands for the rules that the failed stage brings itself."""

    rules: tuple[Rule | Literal["rules of the stage"], ...]
    guidance: dict[Literal["default"] | Reason, Steps]


class _OwnRule(Rule):
    stages: tuple[()] = ()


class _StageFile(_Model):
    """The file of a stage's own rules, which :attr:`slipway.stage.Stage.recovery` names. They apply to it alone."""

    rules: tuple[_OwnRule, ...] = ()
    guidance: dict[Reason, Steps] = Field(default_factory=dict)


_File = TypeVar("_File", _TableFile, _StageFile)


@dataclass(frozen=True, slots=True)
class RuleTable:
    """Rules in order, and steps for people after failures that no rule handles.

    Attributes:
        rules: Every rule, those of stages among them.
        guidance: Steps by stage (empty for all) and reason (``default`` for all others).
    """

    rules: tuple[Rule, ...]
    guidance: Mapping[tuple[str, str], Steps]


def load_rules(path: Path = DEFAULT_RULES) -> RuleTable:
    """Read and check a table, and the rules of installed stages if the table has a row for them.

    Raises:
        ConfigurationError: reason ``CONFIGURATION_NOT_FOUND`` or ``CONFIGURATION_INVALID``, naming the file.
    """
    table = _read(path, _TableFile)
    own = [
        (stage.name, _read(stage.recovery, _StageFile))
        for stage in map(known_stage, stage_names())
        if stage is not None and stage.recovery is not None
    ]
    rules: list[Rule] = []
    steps = {("", reason): said for reason, said in table.guidance.items()}
    for row in table.rules:
        if isinstance(row, Rule):
            rules.append(row)
            continue
        for name, file in own:
            rules += (rule.model_copy(update={"stages": (name,)}) for rule in file.rules)
            steps |= {(name, reason): said for reason, said in file.guidance.items()}
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _invalid_error(path, f"rules with the same name: {', '.join(twice)}")
    if ("", "default") not in steps:
        raise _invalid_error(path, "guidance lacks default")
    return RuleTable(tuple(rules), steps)


@cache
def default_rules() -> RuleTable:
    """Return the built-in table."""
    return load_rules()


def _read(path: Path, kind: type[_File]) -> _File:
    try:
        return kind.model_validate(load_document(path))
    except OSError as error:
        raise ConfigurationError(
            f"the recovery rules {path} cannot be read: {error.strerror}", reason="CONFIGURATION_NOT_FOUND"
        ) from error
    except YamlError as error:
        raise _invalid_error(path, str(error)) from error
    except pydantic.ValidationError as error:
        faults = error.errors(include_url=False)[:_MOST_PROBLEMS]
        problems = (f"{'.'.join(map(str, one['loc'])) or 'the document'}: {one['msg']}" for one in faults)
        raise _invalid_error(path, "; ".join(problems)) from error


def _invalid_error(path: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"the recovery rules {path} are not valid: {problem}", remedy=f"compare them with {DEFAULT_RULES}"
    )
