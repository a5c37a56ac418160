"""Choose the bits of each weight within a size, by how much the model's results suffer from its rounding.

A weight with a calibration has a measured sensitivity: the divergence of the whole model on held-out text when this weight alone is
rounded. Weights without one are compared by their relative error, which needs no text, and by their place in the model.

Weights that graphs for serving and vLLM join to one have the same number of bits. The choice is a multiple-choice knapsack: one option
for each item, so that the sum of errors is small within the size.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from slipway.stage import Context
from slipway_quantize.grid.rounding import round_weight
from slipway_quantize.grid.search import Array
from slipway_quantize.levels import SizeBudget, size_budget_error

MEASURED, ESTIMATED = "held-out divergence", "weights alone"
_LAYER = re.compile(r"\.(\d+)\.")
_DIRECT, _PREFERRED = ("v_proj", "down_proj"), 3.0
_OUTERMOST, _OUTER = 2, 2.0

_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Layers that are joined, by the last part of their names: attention, gates (LFM2's are numbered), linear attention, latent attention."""
_JOINED = "+"
"""Stands between the parts of a weight that is joined already."""


@dataclass(frozen=True)
class Candidate:
    """A weight whose bits are to be chosen.

    Attributes:
        name: Its name in the output's report.
        sizes: Size of what is stored of it, by bits.
        pieces: Functions that read it, piece by piece.
        sensitivity: Divergence that its rounding to the fewest bits adds; None if it was not measured.
    """

    name: str
    sizes: Mapping[int, int]
    pieces: Sequence[Callable[[], Array]]
    sensitivity: float | None = None


@dataclass(frozen=True)
class Choice:
    """The bits of each weight.

    Attributes:
        bits: Bits by name.
        facts: How the choice was made, for people and for the report.
    """

    bits: Mapping[str, int]
    facts: Mapping[str, Any]


def choose_bits(
    candidates: Sequence[Candidate], *, fixed: int, budget: SizeBudget, weights: int, group_size: int, ctx: Context
) -> Choice:
    """Choose the bits of weights so that all have at most the budget's size.

    Args:
        candidates: The weights whose bits are chosen.
        fixed: Bytes of all other content.
        budget: The largest size.
        weights: Number of all weights, also of those that keep their type.
        group_size: Weights per scale.
        ctx: Progress, cancellation and threads.

    Raises:
        QuantizationError: ``SIZE_BUDGET_UNMET``, with the smallest possible size; ``NON_FINITE_WEIGHTS``.
    """
    by_name = {each.name: each for each in candidates}
    joined = [[by_name[name] for name in unit] for unit in units(by_name)]
    sizes = [[Option(sum(each.sizes[bits] for each in unit), 0.0) for bits in unit[0].sizes] for unit in joined]
    least = fixed + smallest_size(sizes)
    limit = budget.of(weights, least=least, most=fixed + sum(max(each.sizes.values()) for each in candidates))
    if least > limit:
        raise size_budget_error(limit, least)
    errors = _errors(candidates, group_size=group_size, ctx=ctx)
    widths = [tuple(unit[0].sizes) for unit in joined]
    items = [
        [
            Option(option.size, sum(errors[each.name][bits] for each in unit))
            for option, bits in zip(options, of, strict=True)
        ]
        for unit, options, of in zip(joined, sizes, widths, strict=True)
    ]
    solution = choose_options(items, room=limit - fixed)
    assert solution is not None  # the smallest sizes fit
    bits = {each.name: widths[index][option] for index, option in enumerate(solution.chosen) for each in joined[index]}
    measured = [each.name for each in candidates if each.sensitivity is not None]
    facts = {
        "size_budget_bytes": limit,
        "smallest_bytes": least,
        "planned_bytes": fixed + solution.size,
        "sensitivity": MEASURED if measured else ESTIMATED,
        "sensitivities_measured": len(measured),
        "error": solution.error,
        "error_bound": solution.bound,
        "weights_by_bits": {str(key): count for key, count in sorted(Counter(bits.values()).items())},
    }
    return Choice(bits, facts)


def _errors(candidates: Sequence[Candidate], *, group_size: int, ctx: Context) -> dict[str, dict[int, float]]:
    """Return the error of each candidate by bits; estimates are scaled to the measured ones, if there are both."""
    shares: dict[str, dict[int, float]] = {}
    importance = importance_by_place([each.name for each in candidates])
    with ThreadPoolExecutor(ctx.threads) as pool:
        for done, each in enumerate(candidates):
            ctx.progress("measure", done=done, total=len(candidates), unit="tensors")
            by_bits = _relative_errors(each, group_size=group_size, pool=pool)
            shares[each.name] = {bits: share * importance[each.name] for bits, share in by_bits.items()}
    least = {each.name: shares[each.name][min(each.sizes)] for each in candidates}
    known = {each.name: each.sensitivity for each in candidates if each.sensitivity is not None}
    ratios = {name: sensitivity / least[name] if least[name] else 0.0 for name, sensitivity in known.items()}
    usual = median([ratio for ratio in ratios.values() if ratio] or [1.0])
    return {
        name: {bits: share * ratios.get(name, usual) for bits, share in by_bits.items()}
        for name, by_bits in shares.items()
    }


def importance_by_place(names: Sequence[str]) -> dict[str, float]:
    """Return how many times more an error of each weight costs than one of most others, by experience.

    The value projection and the second half of a feed-forward network add directly to the hidden states. The outermost layers have no
    layers before or behind them that make up for their errors. llama.cpp's mixtures of bits (``use_more_bits``) prefer the same ones.
    """
    layers = {name: int(match[1]) for name in names if (match := _LAYER.search(name))}
    last = max(layers.values(), default=0)
    return {
        name: (_PREFERRED if any(part in name for part in _DIRECT) else 1.0)
        * (_OUTER if name in layers and not _OUTERMOST <= layers[name] <= last - _OUTERMOST else 1.0)
        for name in names
    }


def _relative_errors(each: Candidate, *, group_size: int, pool: ThreadPoolExecutor) -> dict[int, float]:
    """Return the squared error of rounding a weight as a share of the weight's squares, by bits."""

    def measure(read: Callable[[], Array]) -> list[tuple[float, float]]:
        values = read()
        scales = np.dtype(np.float32)
        results = (
            round_weight(values, bits=bits, group_size=group_size, scale_dtype=scales, name=each.name)
            for bits in each.sizes
        )
        return [(rounded.error, rounded.energy) for rounded in results]

    parts = list(pool.map(measure, each.pieces))
    return {
        bits: math.fsum(part[index][0] for part in parts) / max(math.fsum(part[index][1] for part in parts), 1e-30)
        for index, bits in enumerate(each.sizes)
    }


def units(names: Iterable[str]) -> list[list[str]]:
    """Group the names of weights that must have the same number of bits, in the order of each group's first."""
    groups: dict[tuple[str, Any], list[str]] = {}
    for name in names:
        path, _, last = name.removesuffix(".T").removesuffix(".weight").rpartition(".")
        fused = next((parts for parts in _FUSED if set(last.split(_JOINED)) <= set(parts)), None)
        groups.setdefault((path, fused or last), []).append(name)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store an item.

    Attributes:
        size: Its size in bytes.
        error: What it costs.
    """

    size: int
    error: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The chosen options.

    Attributes:
        chosen: Index of the option of each item.
        size: Sum of their sizes.
        error: Sum of their errors.
        bound: Lower bound of the sum of errors that any choice within the size has.
    """

    chosen: tuple[int, ...]
    size: int
    error: float
    bound: float


def smallest_size(items: Sequence[Sequence[Option]]) -> int:
    """Return the smallest size that any choice has."""
    return sum(min(option.size for option in options) for options in items)


def choose_options(items: Sequence[Sequence[Option]], *, room: int) -> Solution | None:
    """Choose one option for each item; return None if even the smallest ones do not fit.

    Each item starts with its smallest option. Steps to larger options on the lower convex hull of (size, error) are taken in the order of
    the error that they save per byte, those that still fit. The first step that does not fit gives the bound: a part of it would
    be the best choice if options could be divided, so this choice is worse than the best by less than that one step saves.

    Args:
        items: The options of each item, at least one.
        room: Largest sum of sizes.
    """
    hulls = [_hull(options) for options in items]
    chosen = [hull[0] for hull in hulls]
    size = sum(items[item][first].size for item, first in enumerate(chosen))
    if size > room:
        return None
    steps = [
        (-_saved_error(items[item], step) / _added_bytes(items[item], step), item, step)
        for item, hull in enumerate(hulls)
        for step in pairwise(hull)
    ]
    error = sum(items[item][first].error for item, first in enumerate(chosen))
    bound, divided, blocked = error, False, set[int]()
    for rate, item, step in sorted(steps):
        more = _added_bytes(items[item], step)
        if not divided:
            share = min(1.0, (room - size) / more)
            bound += rate * more * share
            divided = share < 1
        if item in blocked or size + more > room:
            blocked.add(item)  # later steps of the item start from this one
            continue
        chosen[item], size = step[1], size + more
        error -= _saved_error(items[item], step)
    return Solution(tuple(chosen), size, max(error, 0.0), max(min(bound, error), 0.0))


def _hull(options: Sequence[Option]) -> list[int]:
    """Return the options on the lower convex hull, by size: each saves less per byte than the one before."""
    hull: list[int] = []
    for index in sorted(range(len(options)), key=lambda each: (options[each].size, options[each].error, each)):
        if hull and options[index].error >= options[hull[-1]].error:
            continue
        while len(hull) > 1 and _rate(options, (hull[-1], index)) >= _rate(options, (hull[-2], hull[-1])):
            hull.pop()
        hull.append(index)
    return hull


def _saved_error(options: Sequence[Option], step: tuple[int, int]) -> float:
    return options[step[0]].error - options[step[1]].error


def _added_bytes(options: Sequence[Option], step: tuple[int, int]) -> int:
    return options[step[1]].size - options[step[0]].size


def _rate(options: Sequence[Option], step: tuple[int, int]) -> float:
    return _saved_error(options, step) / _added_bytes(options, step)
