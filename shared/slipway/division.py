"""Divide a task of a stage into parts and a task that joins them (:class:`slipway.stage.Division`). Pure.

All of them are tasks of the same stage, so workers, rules of recovery, limits and metrics treat them alike. Two parameters tell them
apart: ``parts`` says how many there are, and ``part`` which of them a task is, with 0 for the join. A worker of an earlier version does
not know these parameters and takes none of the tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pydantic
from pydantic import Field

from slipway.parts import Part
from slipway.sizes import ModelSize
from slipway.stage import Context, Keeps, Stage, StageParams

PART, PARTS = "part", "parts"
"""Names of the parameters."""

OUTPUT = "part"
"""Name of a part's output."""

MOST_PARTS = 999


def is_part(params: Mapping[str, Any]) -> bool:
    """Return whether parameters are those of a part, not of a whole task or of the task that joins its parts."""
    return bool(params.get(PARTS)) and bool(params.get(PART))


def is_join(params: Mapping[str, Any]) -> bool:
    """Return whether parameters are those of a task that joins parts."""
    return bool(params.get(PARTS)) and not params.get(PART)


def part_id(task: str, number: int) -> str:
    """Return the id of a part of a task."""
    return f"{task}.part-{number}"


def split_id(task: str, params: Mapping[str, Any]) -> tuple[str, str]:
    """Return the id of the whole task, and the name of the part of it: ``part-1``, or nothing if these parameters are of no part."""
    if not is_part(params):
        return task, ""
    whole, _, part = task.rpartition(".")
    return whole, part


def undivided(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the whole task."""
    return {name: value for name, value in params.items() if name not in {PART, PARTS}}


def input_names(parts: int) -> tuple[str, ...]:
    """Return the names under which a join has its parts, in order."""
    return tuple(f"part-{number:03d}" for number in range(1, parts + 1))


def step_parameters(stage: Stage[Any]) -> tuple[str, ...]:
    """Return the names of all parameters that tasks of a stage may have, sorted."""
    params = stage.params if stage.division is None else _divided_params(stage.params)
    return tuple(sorted(params.model_fields))


def step_of(stage: Stage[Any], params: Mapping[str, Any]) -> Stage[Any]:
    """Return the stage as a task with these parameters runs it: whole, one part of it, or the join of its parts."""
    parts, number = params.get(PARTS), params.get(PART, 0)
    if stage.division is None or PARTS not in params:
        return stage
    known = replace(stage, params=_divided_params(stage.params), division=None)
    if not isinstance(parts, int) or not isinstance(number, int) or not 1 < parts <= MOST_PARTS:
        return known  # its parameters say what is wrong
    return _part(known, stage) if number else _join(known, stage, parts)


def _part(known: Stage[Any], stage: Stage[Any]) -> Stage[Any]:
    division, forecast = stage.division, stage.forecast
    assert division is not None

    def run(inputs: Mapping[str, Path], params: Any, ctx: Context) -> dict[str, Path]:
        return {OUTPUT: division.run(inputs, _whole(stage, params), Part(params.part, params.parts), ctx)}

    return replace(
        known,
        outputs=(OUTPUT,),
        run=run,
        role=None,
        # The join's output has the files of the parts, which are stored once.
        forecast=replace(forecast, output_bytes=lambda _params, _size: 0, work_bytes=partial(_share_of_work, stage)),
    )


def _share_of_work(stage: Stage[Any], params: Any, _made: int, size: ModelSize) -> float:
    """Return the work of a part."""
    whole = _whole(stage, params)
    return stage.forecast.work_bytes(whole, stage.forecast.output_bytes(whole, size), size) / params.parts


def _join(known: Stage[Any], stage: Stage[Any], parts: int) -> Stage[Any]:
    division, names = stage.division, input_names(parts)
    assert division is not None

    def run(inputs: Mapping[str, Path], params: Any, ctx: Context) -> dict[str, Path]:
        return {stage.main_output: division.join({name: inputs[name] for name in names}, _whole(stage, params), ctx)}

    return replace(
        known,
        inputs=names,
        optional_inputs=(),
        outputs=(stage.main_output,),
        run=run,
        adopts=division.adopts,
        keeps=Keeps.NOTHING,
        forecast=replace(stage.forecast, work_bytes=lambda _params, _made, _size: 0),
    )


def _whole(stage: Stage[Any], params: StageParams) -> StageParams:
    """Return the parameters of the whole task."""
    return stage.params.model_validate(undivided(params.model_dump()))


def _divided_params(params: type[StageParams]) -> type[StageParams]:
    """Return the type of the parameters of the tasks that a task with these parameters is divided into."""
    if params not in _DIVIDED:
        _DIVIDED[params] = pydantic.create_model(
            f"Divided{params.__name__}", __base__=(_Divided, params), __module__=params.__module__
        )
    return _DIVIDED[params]


_DIVIDED: dict[type[StageParams], type[StageParams]] = {}


class _Divided(StageParams):
    """The parameters that tell the tasks of a divided one apart."""

    parts: int = Field(ge=2, le=MOST_PARTS, description="number of parts that the work is divided into")
    part: int = Field(default=0, ge=0, description="number of the part that this task does; 0 joins all of them")

    @pydantic.model_validator(mode="after")
    def _check_part(self) -> _Divided:
        if self.part > self.parts:
            raise ValueError(f"part {self.part} of {self.parts}")
        return self
