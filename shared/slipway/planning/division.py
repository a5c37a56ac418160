"""Divide the tasks of a plan whose stage allows it: into parts, which several workers can do, and a task that joins them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slipway.division import MOST_PARTS, OUTPUT, PART, PARTS, input_names, part_id
from slipway.formats.tasks import PlannedTask

_WEIGHTS, _PICKLES = (".safetensors",), (".bin", ".pt", ".pth")


def weight_bytes(sizes: Mapping[str, int]) -> int:
    """Return the bytes of a model's weights.

    Args:
        sizes: Size of each file of the model by its path; pickles count only if there is nothing else.
    """
    by_kind = (sum(size for name, size in sizes.items() if name.endswith(kind)) for kind in (_WEIGHTS, _PICKLES))
    return next(filter(None, by_kind), 0)


def divide(tasks: Sequence[PlannedTask], *, split_bytes: int, weight_bytes: int) -> tuple[PlannedTask, ...]:
    """Divide every task that can be divided, if the model is larger than a part may be.

    The task that joins the parts has the id of the divided one, so that references to its output stay as they are.

    Args:
        tasks: A plan.
        split_bytes: Wanted size of a part; 0 divides nothing.
        weight_bytes: Size of the base's weights; 0 while unknown, which divides nothing.
    """
    if not split_bytes or weight_bytes <= split_bytes:
        return tuple(tasks)
    wanted = min(_ceil(weight_bytes, split_bytes), MOST_PARTS)
    return tuple(each for task in tasks for each in _divide_task(task, min(wanted, _most_parts(task, weight_bytes))))


def _most_parts(task: PlannedTask, weight_bytes: int) -> int:
    known = task.known()
    if known is None or known[0].division is None:
        return 1
    return int(known[0].division.most(known[1], task.inputs.keys(), weight_bytes))


def _divide_task(task: PlannedTask, parts: int) -> list[PlannedTask]:
    """Return the tasks of a task that is divided into so many parts; the task itself for one part."""
    if parts < 2:
        return [task]
    made = [
        replace(
            task,
            id=part_id(task.id, number),
            params={**task.params, PARTS: parts, PART: number},
            format="",
            output=OUTPUT,
            open=(),
        )
        for number in range(1, parts + 1)
    ]
    inputs = {name: part.reference for name, part in zip(input_names(parts), made, strict=True)}
    return [*made, replace(task, params={**task.params, PARTS: parts}, inputs=inputs, open=())]


def _ceil(size: int, part: int) -> int:
    return -(-size // part)
