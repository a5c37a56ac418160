"""What judging the outputs of an export asks of workers, whatever its formats are. Pure."""

from __future__ import annotations

from functools import cache

from slipway.configuration import ExportConfiguration
from slipway.errors import Failure, ModelExportError
from slipway.planning.plan import plan
from slipway.registry import plays
from slipway.requirements import Placement
from slipway.rpc.formats import Judge
from slipway.stage import Role


def validation_obstacle(judge: Judge) -> Failure | None:
    """Return why the outputs of an export with default settings cannot be judged; None if they can.

    Args:
        judge: Returns why a task cannot be carried out now.
    """
    try:
        steps = _validation_steps()
    except ModelExportError as error:
        return error.failure()
    return next(filter(None, map(judge, steps)), None)


@cache
def _validation_steps() -> tuple[Placement, ...]:
    tasks = plan(ExportConfiguration.model_validate({}), {"base", "adapter"})
    return tuple(
        Placement(task.stage, task.requirements, parameters=frozenset(task.params))
        for task in tasks
        if plays(task.stage, Role.REFERENCE, Role.VALIDATION)
    )
