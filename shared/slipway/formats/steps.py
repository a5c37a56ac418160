"""What making an output takes: the stages of its tasks, found by planning it alone with default settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipway.formats.contract import Format
from slipway.formats.tasks import FormatRequest, PlannedTask
from slipway.registry import stage_of
from slipway.requirements import Placement
from slipway.stage import Role


def plain_request(each: Format[Any]) -> FormatRequest[Any]:
    """Return the request for a format's output without quantization, with default settings."""
    return FormatRequest(
        each.name, each.settings(), (), model="task:merged/model", base="source:base", adapter="source:adapter"
    )


def steps_of(each: Format[Any], level: str = "") -> tuple[Placement, ...]:
    """Return the tasks that make a format's output at a level (empty: without quantization), in order, as what they ask of workers.

    Raises:
        Exception: Whatever the format's own function raises; see :func:`slipway.formats.registry.translate_format_errors`.
    """
    request = plain_request(each)
    if level:
        request = replace(request, levels=(level,))
    return steps_before(tuple(each.plan(request)), each.output_name(level), model=request.model)


def steps_before(tasks: Sequence[PlannedTask], output: str, *, model: str) -> tuple[Placement, ...]:
    """Return the planned tasks that make an output, in order, without repeating one. Without such a task, it is the merged model itself."""
    steps, wanted = list[Placement](), set[str]()
    for task in reversed(tasks):
        if task.format == output or task.reference in wanted:
            wanted |= set(task.inputs.values())
            steps.append(Placement(task.stage, task.requirements, parameters=frozenset(task.params)))
    merged = [Placement(stage_of(Role.MERGE).name)] if model in wanted or not steps else []
    return (*merged, *dict.fromkeys(reversed(steps)))


def stages_of(steps: Sequence[Placement]) -> list[str]:
    """Return the stages of some steps, each once."""
    return list(dict.fromkeys(step.stage for step in steps))
