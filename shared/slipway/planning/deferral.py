"""Leave weights out of intermediate outputs: the tasks that read them make the weights on the way, from the inputs of the task before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slipway.formats.tasks import PlannedTask
from slipway.registry import known_stage


def defer_weights(tasks: Sequence[PlannedTask]) -> list[PlannedTask]:
    """Let each task leave out its output's weights if no format delivers it and every task that reads it can do without them.

    Args:
        tasks: A plan, each task after those whose outputs it uses. Only its own tasks may use their outputs.
    """
    planned = {task.id: task for task in tasks}
    for task in reversed(tasks):  # whether a task reads its input without weights may depend on its own output
        readers = [
            (reader, name)
            for reader in planned.values()
            for name, used in reader.inputs.items()
            if used == task.reference
        ]
        if not task.format and readers and _defers(task) and all(_reads(reader, name) for reader, name in readers):
            planned[task.id] = replace(task, params={**task.params, "weights": "deferred"})
    deferred = {task.reference: task.id for task in planned.values() if task.params.get("weights") == "deferred"}
    for task in tasks:
        more: dict[str, str] = {}
        for used in task.inputs.values():
            more |= planned[deferred[used]].inputs if used in deferred else {}
        if more:
            planned[task.id] = replace(planned[task.id], inputs=_together(task.inputs, more))
    return list(planned.values())


def _defers(task: PlannedTask) -> bool:
    stage = known_stage(task.stage)
    return stage is not None and stage.defers(task.params)


def _reads(task: PlannedTask, name: str) -> bool:
    stage = known_stage(task.stage)
    return stage is not None and name in stage.reads_deferred(task.params)


def _together(inputs: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Add the inputs of the task before; a name stands for the same folder in both, or the stages do not fit together."""
    taken = sorted(name for name in inputs.keys() & more.keys() if inputs[name] != more[name])
    if taken:
        raise AssertionError(f"two inputs would be called {taken[0]!r}")
    return {**inputs, **more}
