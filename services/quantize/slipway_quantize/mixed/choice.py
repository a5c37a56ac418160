"""Choose the bits of each weight by how much the model's results suffer from its rounding.

A weight with a calibration has a measured sensitivity: the divergence of the whole model on held-out text when this weight alone is
rounded. Weights without one are compared by the squared error of one output for inputs of unit variance, which the weight alone tells.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from slipway.stage import Context
from slipway_quantize.grid.rounding import round_weight
from slipway_quantize.grid.search import Array
from slipway_quantize.mixed.budget import unmet
from slipway_quantize.mixed.knapsack import Option, choose, smallest

MEASURED, ESTIMATED = "held-out divergence", "weights alone"
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that graphs for serving, and vLLM, join to one: they have the same number of bits."""


@dataclass(frozen=True)
class Candidate:
    """A weight whose bits are to be chosen.

    Attributes:
        name: Its name in the output's report.
        outputs: Number of its output features.
        sizes: Size of what is stored of it, by bits.
        pieces: Functions that read it, piece by piece.
        sensitivity: Divergence that its rounding to the fewest bits adds; None if it was not measured.
    """

    name: str
    outputs: int
    sizes: Mapping[int, int]
    pieces: Sequence[Callable[[], Array]]
    sensitivity: float | None = None


@dataclass(frozen=True)
class Choice:
    """The bits of each weight.

    Attributes:
        bits: Bits by name.
        facts: What was chosen by, for people and for the report.
    """

    bits: Mapping[str, int]
    facts: Mapping[str, Any]


def choose_bits(candidates: Sequence[Candidate], *, fixed: int, limit: int, group_size: int, ctx: Context) -> Choice:
    """Choose the bits of weights so that all have at most ``limit`` bytes with ``fixed`` ones of other content.

    Raises:
        QuantizationError: ``SIZE_BUDGET_UNMET``, with the smallest possible size; ``NON_FINITE_WEIGHTS``.
    """
    units = _units(candidates)
    sizes = [[Option(sum(each.sizes[bits] for each in unit), 0.0) for bits in unit[0].sizes] for unit in units]
    least = fixed + smallest(sizes)
    if least > limit:
        raise unmet(limit, least)
    errors = _errors(candidates, group_size=group_size, ctx=ctx)
    widths = [tuple(unit[0].sizes) for unit in units]
    items = [
        [
            Option(option.size, sum(errors[each.name][bits] for each in unit))
            for option, bits in zip(options, of, strict=True)
        ]
        for unit, options, of in zip(units, sizes, widths, strict=True)
    ]
    solution = choose(items, room=limit - fixed)
    assert solution is not None  # the smallest sizes fit
    bits = {each.name: widths[index][option] for index, option in enumerate(solution.chosen) for each in units[index]}
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


def _units(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Return the candidates in groups that have the same bits."""
    found: dict[tuple[str, Any], list[Candidate]] = {}
    for each in candidates:
        path, _, last = each.name.removesuffix(".T").removesuffix(".weight").rpartition(".")
        fused = next((names for names in _FUSED if set(last.split("+")) <= set(names)), None)
        found.setdefault((path, fused or last), []).append(each)
    return list(found.values())


def _errors(candidates: Sequence[Candidate], *, group_size: int, ctx: Context) -> dict[str, dict[int, float]]:
    """Return the error of each candidate by bits; estimates are scaled to the measured ones, if there are both."""
    squares: dict[str, dict[int, float]] = {}
    with ThreadPoolExecutor(ctx.threads) as pool:
        for done, each in enumerate(candidates):
            ctx.progress("measure", done=done, total=len(candidates), unit="tensors")
            squares[each.name] = _squares(each, group_size=group_size, pool=pool)
    least = {each.name: squares[each.name][min(each.sizes)] for each in candidates}
    ratios = [
        each.sensitivity * each.outputs / least[each.name]
        for each in candidates
        if each.sensitivity is not None and least[each.name]
    ]
    usual = median(ratios) if ratios else 1.0
    scales = {
        each.name: usual / each.outputs
        if each.sensitivity is None
        else (each.sensitivity / least[each.name] if least[each.name] else 0.0)
        for each in candidates
    }
    return {name: {bits: value * scales[name] for bits, value in found.items()} for name, found in squares.items()}


def _squares(each: Candidate, *, group_size: int, pool: ThreadPoolExecutor) -> dict[int, float]:
    """Return the squared error of rounding a weight, by bits."""

    def measure(read: Callable[[], Array]) -> list[float]:
        values = read()
        scales = np.dtype(np.float32)
        return [
            round_weight(values, bits=bits, group_size=group_size, scale_dtype=scales, name=each.name).error
            for bits in each.sizes
        ]

    parts = list(pool.map(measure, each.pieces))
    return {bits: math.fsum(part[index] for part in parts) for index, bits in enumerate(each.sizes)}
