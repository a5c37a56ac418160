"""Leave weights out of intermediate outputs: the tasks that read them make the weights on the way, from the inputs of the task before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from slipway.formats.tasks import PlannedTask


def defer_weights(tasks: Sequence[PlannedTask], *, compared: bool) -> list[PlannedTask]:
    """Let each task leave out its output's weights if no format delivers it and every task that reads it can do without them.

    Args:
        tasks: A plan, each task after those whose outputs it uses. No task outside of the plan may use their outputs.
        compared: Whether validation compares the outputs. If not, a stage's own comparison is the only one, and it needs the weights.
    """
    whole: set[str] = set()
    while True:
        planned = _plan_deferral(tasks, whole, compared=compared)
        clashing = _join_inputs(tasks, planned)
        if not clashing:
            return list(planned.values())
        whole.add(clashing)


def _plan_deferral(tasks: Sequence[PlannedTask], whole: Collection[str], *, compared: bool) -> dict[str, PlannedTask]:
    """Return the tasks by id, with ``weights: deferred`` for those that can leave out weights and are not in ``whole``."""
    planned = {task.id: task for task in tasks}
    for task in reversed(tasks):  # whether a task reads its input without weights may depend on its own output
        readers = [
            (reader, name)
            for reader in planned.values()
            for name, used in reader.inputs.items()
            if used == task.reference
        ]
        if task.format or task.id in whole or not readers or not _leaves_out(task, compared=compared):
            continue
        if all(_reads(reader, name) for reader, name in readers):
            planned[task.id] = replace(task, params={**task.params, "weights": "deferred"})
    return planned


def _join_inputs(tasks: Sequence[PlannedTask], planned: dict[str, PlannedTask]) -> str:
    """Give the readers of left-out weights the inputs of the task that left them out.

    Return the id of a task whose inputs would take names that a reader uses for something else, so that it cannot leave out its
    weights; empty if there is none.
    """
    deferred = {task.reference: task.id for task in planned.values() if task.params.get("weights") == "deferred"}
    for task in tasks:
        inputs = dict(task.inputs)
        for used in task.inputs.values():
            more = planned[deferred[used]].inputs if used in deferred else {}
            if any(inputs.get(name, reference) != reference for name, reference in more.items()):
                return deferred[used]
            inputs |= more
        planned[task.id] = replace(planned[task.id], inputs=inputs)
    return ""


def _leaves_out(task: PlannedTask, *, compared: bool) -> bool:
    known = task.known()
    if known is None or (known[0].deferral.compares and not compared):
        return False
    return known[0].deferral.leaves_out(known[1])


def _reads(task: PlannedTask, name: str) -> bool:
    known = task.known()
    return known is not None and name in known[0].deferral.reads(known[1])
