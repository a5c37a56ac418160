"""Choose the layers that get 8 bits instead of fewer: those whose rounding costs the model's results the most.

Axes: N output features, K input features, G groups of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipway_quantize.calibration.rounding.grid import Grid
from slipway_quantize.calibration.streaming.crew import Crew
from slipway_quantize.calibration.streaming.layers import Layer
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.streaming.moments import Observer
from slipway_quantize.calibration.tuning.divergence import draw_gradients
from slipway_quantize.calibration.windows import Batch
from slipway_quantize.grid.mixed import Option, choose_options, units
from slipway_quantize.levels import WIDE


@dataclass
class _Sums:
    """Sums over positions of the squares of a layer's inputs (K), and of the gradients of its results (N)."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: _Sums) -> None:
        for mine, others in ((self.inputs, other.inputs), (self.gradients, other.gradients)):
            for name, values in others.items():
                mine[name] = mine[name] + values if name in mine else values
        for name, count in other.positions.items():
            self.positions[name] = self.positions.get(name, 0) + count


class _Squares(Observer):
    """Sums squares while a model computes and passes back; nothing ends it early."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        super().__init__(layers)
        self.sums = _Sums()

    def see(self, layer: Layer, inputs: Tensor) -> None:
        self._note(layer, inputs)

    @torch.no_grad()
    def _note(self, layer: Layer, inputs: Tensor) -> None:
        seen = self._inputs(inputs)
        squares = _Sums({layer.name: seen.square().sum(0)}, {layer.name: len(seen)})
        self.sums.add(squares)

    @torch.no_grad()
    def pass_back(self, layer: Layer, gradients: Tensor) -> None:
        self.sums.add(_Sums(gradients={layer.name: gradients.reshape(-1, gradients.shape[-1]).square().sum(0)}))


def rounding_costs(
    models: Sequence[StreamedModel],
    batches: Sequence[Batch],
    *,
    grid: Grid,
    distributions: bool,
    crew: Crew,
    seed: int,
    save_memory: bool,
    on_batch: Callable[[int], None],
) -> dict[str, float]:
    """Estimate the divergence per position that each layer adds if it alone is rounded to a grid, by one pass forward and back.

    To second order, errors of weights add half of their Fisher information to the divergence (as in
    :func:`~slipway_quantize.calibration.tuning.tuning.embedding_moments`). Errors of a weight are taken as uniform within a step
    of its group's grid, and inputs and gradients as independent. This ranks layers, which is all that a choice needs.

    Args:
        models: The model, for each member of the crew.
        batches: Windows to compute.
        grid: The grid.
        distributions: Whether the model's results are distributions.
        crew: Computes batches side by side.
        seed: Seed of what is drawn.
        save_memory: Whether blocks are computed again for their gradients.
        on_batch: Called with the number of each batch before it.
    """

    def measure(member: int) -> tuple[_Sums, int]:
        model, positions = models[member], 0
        squares = _Squares(model.layers)
        for number in crew.share(member, range(len(batches))):
            on_batch(number)
            squares.begin(batches[number].masks)
            positions += _measure(model, batches[number], squares, distributions, seed + number)
        return squares.sums, positions

    for model in models:
        model.save_memory(on=save_memory)
    try:
        parts = crew.run(measure)
    finally:
        for model in models:
            model.save_memory(on=False)
    sums = _Sums()
    for part, _ in parts:
        sums.add(part)
    positions = max(1, sum(count for _, count in parts))
    layers = models[0].layers
    return {
        name: _cost(layer, grid, sums.inputs[name] / sums.positions[name], sums.gradients[name] / positions)
        for name, layer in layers.items()
        if name in sums.inputs and name in sums.gradients
    }


def _measure(model: StreamedModel, batch: Batch, squares: _Squares, distributions: bool, seed: int) -> int:
    """Add the squares of one batch to the sums; return the number of its results."""
    layers = list(model.layers.values())
    for layer in layers:
        layer.differentiate = squares.pass_back
    try:
        with squares.watch(layers):
            results = model.outputs(batch)
        if not bool(results.isfinite().all()):  # the pass over the blocks says where it begins
            return 0
        draw = torch.Generator().manual_seed(seed)
        results.backward(draw_gradients(results, distributions=distributions, draw=draw))
    finally:
        for layer in layers:
            layer.differentiate = None
    return len(results)


@torch.no_grad()
def _cost(layer: Layer, grid: Grid, inputs: Tensor, gradients: Tensor) -> float:
    """Return half of the Fisher information of uniform errors of a layer's weight, from means of squares (K) and (N)."""
    shares, total = inputs.view(-1, grid.group_size).sum(-1), 0.0  # (G)
    for rows in layer.pieces:
        total += float(((grid.steps(layer.exact(rows)).square() @ shares) * gradients[rows]).sum(dtype=torch.float64))
    return total / 24


def wide_layers(costs: Mapping[str, float], weights: Mapping[str, int], *, bits: int, share: float) -> frozenset[str]:
    """Return the layers that get 8 bits so that the sum of costs is smallest.

    Args:
        costs: Cost of rounding each layer to ``bits``, by name; a layer that no text reached has none.
        weights: Number of weights of every layer, by name.
        bits: Bits of the other layers.
        share: Largest share of all weights that get 8 bits.
    """
    finer = 4.0 ** (bits - WIDE)  # the square of the ratio of the steps
    joined = units(weights)
    items = [
        [
            Option(sum(weights[name] for name in unit) * width, sum(costs.get(name, 0.0) for name in unit) * factor)
            for width, factor in ((bits, 1.0), (WIDE, finer))
        ]
        for unit in joined
    ]
    total = sum(weights.values())
    solution = choose_options(items, room=total * bits + int(total * share) * (WIDE - bits))
    assert solution is not None  # the smallest sizes fit
    return frozenset(name for unit, option in zip(joined, solution.chosen, strict=True) if option for name in unit)
