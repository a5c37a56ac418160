"""Precedents: the parameters with which a stage succeeded on a kind of model before, after its own first choice had failed.

They are kept beside the action cache, as results without outputs, and decide only what a configuration leaves open. What is read is
checked like any other foreign data: an entry that is damaged, or that fits the task no more, counts as none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import pydantic

from slipway.artifacts.store import ActionResult
from slipway.distribution import own_version
from slipway.formats.tasks import PlannedTask
from slipway.registry import known_stage
from slipway.texts import one_line

PRECEDENT = "precedent"
"""Name of the rule of an attempt that begins with a precedent, and of the key of its facts."""

_MOST_TEXT, _MOST_WARNINGS = 300, 8


@dataclass(frozen=True, slots=True)
class Precedent:
    """Parameters that worked.

    Attributes:
        params: The open parameters of the attempt that succeeded.
        because: What failed before it, for people; empty if the planned parameters work.
        warnings: Warnings of the rules that led to it: they hold for a result that begins with it, too.
    """

    params: Mapping[str, Any]
    because: str
    warnings: tuple[str, ...] = ()

    def to_result(self) -> ActionResult:
        """Return the entry of the action cache."""
        entry = {"params": dict(self.params), "because": self.because, "warnings": list(self.warnings)}
        return ActionResult(outputs={}, facts={PRECEDENT: entry})

    @classmethod
    def of_result(cls, result: ActionResult | None, task: PlannedTask) -> Self | None:
        """Return the precedent in an entry of the action cache for a task; None for a damaged one, and for one that changes nothing."""
        entry = result.facts.get(PRECEDENT) if result is not None else None
        if not isinstance(entry, dict):
            return None
        params, because, warnings = entry.get("params"), entry.get("because"), entry.get("warnings")
        if not isinstance(params, dict) or not isinstance(because, str) or not isinstance(warnings, list):
            return None
        changed = {name: value for name, value in params.items() if task.params.get(name) != value}
        if not because or not changed or not set(changed) <= set(task.open) or not _fits(task, changed):
            return None
        texts = [one_line(text)[:_MOST_TEXT] for text in warnings[:_MOST_WARNINGS] if isinstance(text, str)]
        return cls(changed, one_line(because)[:_MOST_TEXT], tuple(texts))

    @property
    def note(self) -> str:
        """Describe it for people."""
        said = ", ".join(f"{name} {str(value).lower() or 'none'}" for name, value in self.params.items())
        return f"began with what worked: {said}, because {self.because}"


def _fits(task: PlannedTask, changed: Mapping[str, Any]) -> bool:
    stage = known_stage(task.stage)
    if stage is None:
        return False
    try:
        stage.params.model_validate_json(json.dumps({**task.params, **changed}))
    except (pydantic.ValidationError, TypeError, ValueError):
        return False
    return True


def precedent_key(task: PlannedTask, model_class: str, *, project: str) -> str:
    """Return the key under which precedents of a task are kept; empty if it leaves nothing open or the model's class is unknown.

    Args:
        task: The task as planned, before any precedent.
        model_class: Class and type of the model (:attr:`slipway.model.configuration.ModelConfig.class_and_type`).
        project: Project of the export: others see nothing of it.
    """
    stage = known_stage(task.stage)
    if stage is None or not task.open or not model_class:
        return ""
    document = {
        PRECEDENT: task.stage,
        "version": stage.version,
        "slipway": own_version(),
        "libraries": stage.library_versions(),
        "model": model_class,
        "params": dict(task.params),
        "open": sorted(task.open),
        "project": project,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_precedent(task: PlannedTask, precedent: Precedent | None) -> PlannedTask:
    """Return a task as it begins with a precedent."""
    return task if precedent is None else replace(task, params={**task.params, **precedent.params})
