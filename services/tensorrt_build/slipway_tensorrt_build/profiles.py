"""Optimization profiles: the range of each dynamic axis of the graph's inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipway.errors import TensorRTBuildError

if TYPE_CHECKING:
    from slipway_tensorrt_build.params import TensorRTBuildParams

Shape = tuple[int, ...]
_PAST = "past_key_values."
_UNLIMITED = 1 << 30
_POINTS = ("min", "opt", "max")
_SKIPPING, _SKIPPED = ("camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"), 2
"""Models whose positions begin after that of padding, and the number of positions that no token has."""


@dataclass(frozen=True, slots=True)
class InputProfile:
    """Smallest, typical and largest shape of one input."""

    min: Shape
    opt: Shape
    max: Shape


@dataclass(frozen=True, slots=True)
class _Point:
    batch: int
    sequence: int
    past: int

    def axis(self, name: str, index: int) -> int | None:
        """Return the size of a dynamic axis of the input ``name``, or None if the input is not known."""
        if index == 0:
            return self.batch
        if name in ("input_ids", "position_ids", "token_type_ids"):
            return self.sequence
        if name == "attention_mask":
            return self.past + self.sequence
        if name.startswith(_PAST) and index == 2:
            return self.past
        return None


def positions_of(config: Mapping[str, Any]) -> int:
    """Return the number of a model's positions by its ``config.json``; unlimited if it does not say."""
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    if not isinstance(positions, int) or positions <= 0:
        return _UNLIMITED
    return min(positions - (_SKIPPED if config.get("model_type") in _SKIPPING else 0), _UNLIMITED)


def has_cache(inputs: Iterable[str]) -> bool:
    """Return whether a graph with these inputs has a KV cache."""
    return any(name.startswith(_PAST) for name in inputs)


def plan_profile(
    inputs: Mapping[str, Sequence[int]], params: TensorRTBuildParams, *, positions: int
) -> dict[str, InputProfile]:
    """Return the shapes of every input.

    At each of the three points the mask is as long as past and new tokens together, because TensorRT lays out its
    memory by these points. At the largest point the mask may be longer than the model's positions: a full cache and a long
    prompt are both allowed, and the caller must keep their sum in one call within the positions.

    Args:
        inputs: Shape of each input as the network declares it, -1 for a dynamic axis.
        params: Ranges of batch, sequence and past; the past counts only for a graph with a cache.
        positions: Number of the model's positions; sequence and past are each limited to it.

    Raises:
        TensorRTBuildError: ``TENSORRT_PROFILE_INVALID`` if the ranges begin beyond the positions or leave out the size of
            a fixed axis, ``TENSORRT_BUILD_FAILED`` for a dynamic axis of unknown meaning.
    """
    cached = has_cache(inputs)
    check_positions(params, positions, cached=cached)
    most = _limits(positions, cached=cached)
    points = {
        which: _Point(
            batch=getattr(params.batch, which),
            **{axis: min(getattr(getattr(params, axis), which), limit) for axis, limit in most.items()},
        )
        for which in _POINTS
    }
    _check_fixed_axes(inputs, points["min"], points["max"])
    return {
        name: InputProfile(**{which: _shape(name, shape, point) for which, point in points.items()})
        for name, shape in inputs.items()
    }


def describe_limited_ranges(params: TensorRTBuildParams, positions: int, *, cached: bool) -> str:
    """Describe which requested sizes exceed the model's positions, and what they become; empty if none does."""
    changes = [
        f"{axis}.{which} of {asked} becomes {most}"
        for axis, most in _limits(positions, cached=cached).items()
        for which in _POINTS
        if (asked := getattr(getattr(params, axis), which)) > most and (cached or axis != "past")
    ]
    return f"the model has {positions} positions: {', '.join(changes)}" if changes else ""


def _limits(positions: int, *, cached: bool) -> dict[str, int]:
    """Return the most new tokens of a call, and the most before them."""
    return {"sequence": positions, "past": positions - 1 if cached else 0}


def check_positions(params: TensorRTBuildParams, positions: int, *, cached: bool) -> None:
    """Refuse ranges that begin beyond the model's positions.

    Raises:
        TensorRTBuildError: ``TENSORRT_PROFILE_INVALID``.
    """
    past = params.past.min if cached else 0
    smallest = params.sequence.min + past
    if smallest > positions:
        raise TensorRTBuildError(
            f"the smallest call has {smallest} tokens ({params.sequence.min} of sequence, {past} of past), "
            f"and the model has {positions} positions",
            reason="TENSORRT_PROFILE_INVALID",
            remedy="lower the smallest sequence or past",
            about={"tokens": smallest, "positions": positions},
        )


def _check_fixed_axes(inputs: Mapping[str, Sequence[int]], smallest: _Point, largest: _Point) -> None:
    """Refuse a graph with a fixed axis outside its range: the engine would take none of the sizes asked for."""
    for name, declared in inputs.items():
        for index, size in enumerate(declared):
            low, high = smallest.axis(name, index), largest.axis(name, index)
            if size >= 0 and low is not None and high is not None and not low <= size <= high:
                raise TensorRTBuildError(
                    f"axis {index} of input {name!r} {tuple(declared)} is not dynamic: its size is {size}, "
                    f"and the range asked for is {low} to {high}",
                    reason="TENSORRT_PROFILE_INVALID",
                    remedy="export the graph with dynamic axes, or ask for a range with its size",
                    about={"input": name, "axis": index, "size": size},
                )


def _shape(name: str, declared: Sequence[int], point: _Point) -> Shape:
    sizes = []
    for index, size in enumerate(declared):
        chosen = size if size >= 0 else point.axis(name, index)
        if chosen is None:
            raise TensorRTBuildError(
                f"axis {index} of input {name!r} {tuple(declared)} is dynamic, and no range is known for it",
                remedy="export a graph whose inputs are among input_ids, attention_mask, token_type_ids, position_ids and "
                "past_key_values.N.key|value",
                about={"input": name, "axis": index},
            )
        sizes.append(chosen)
    return tuple(sizes)
