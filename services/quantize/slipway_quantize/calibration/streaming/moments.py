"""Observe the inputs of layers: their second moments, and what a rounding of the weights does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slipway_quantize.calibration.streaming.layers import Layer, Rounding


class Reached(Exception):  # noqa: N818 - nothing is wrong
    """All that is wanted of a computation is there."""


class Observer:
    """What is seen while a block computes.

    Attributes:
        masks: Of the batch that is computed, 1 for positions with text; each of another length. (windows, tokens)
    """

    def __init__(self) -> None:
        self.masks: tuple[Tensor, ...] = ()

    def begin(self, masks: tuple[Tensor, ...]) -> None:
        """Expect a batch with these masks."""
        self.masks = masks

    def _inputs(self, inputs: Tensor) -> Tensor:
        """Return the inputs at positions with text. (positions, K)."""
        for mask in self.masks:
            if inputs.dim() == 3 and inputs.shape[:2] == mask.shape and not bool(mask.all()):
                return inputs[mask == 1]
        return inputs.reshape(-1, inputs.shape[-1])

    @contextmanager
    def watch(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Observe layers within the block."""
        for layer in layers:
            layer.observe = self.see
        try:
            yield
        finally:
            for layer in layers:
                layer.observe = None

    def see(self, layer: Layer, inputs: Tensor) -> None:
        """Take notice of a layer's inputs."""
        raise NotImplementedError


class Moments(Observer):
    """Sums of the inputs' products; layers with the same inputs share them.

    Args:
        layers: The layers; once all were seen, the computation of a batch ends.

    Attributes:
        sums: By the name of the first layer with these inputs. (K, K)
        shared: The name of that layer for each layer.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.sums: dict[str, Tensor] = {}
        self.shared: dict[str, str] = {}
        self._last: tuple[Tensor, str] | None = None
        self._names = frozenset(layer.name for layer in layers)
        self._waiting = set(self._names)

    def begin(self, masks: tuple[Tensor, ...]) -> None:
        """Expect another batch."""
        super().begin(masks)
        self._waiting, self._last = set(self._names), None

    def see(self, layer: Layer, inputs: Tensor) -> None:
        """Add the products of these inputs."""
        self._add(layer, inputs)
        self._waiting.discard(layer.name)
        if not self._waiting:
            raise Reached

    def _add(self, layer: Layer, inputs: Tensor) -> None:
        if self._last is not None and self._last[0] is inputs:
            self.shared[layer.name] = self._last[1]
            return
        self._last = inputs, layer.name
        self.shared[layer.name] = layer.name
        rows = self._inputs(inputs)
        if layer.name in self.sums:
            self.sums[layer.name].addmm_(rows.T, rows)
        else:
            self.sums[layer.name] = rows.T @ rows

    def of(self, name: str) -> Tensor:
        """Return the sums for a layer."""
        return self.sums[self.shared[name]]


class Errors(Observer):
    """Squares of what roundings add to the results of layers.

    Args:
        candidates: Roundings of each layer, by the layer's name and by method.

    Attributes:
        squares: Sum of squares, as ``candidates``.
        energy: Sum of squares of the exact results, by layer.
    """

    def __init__(self, candidates: Mapping[str, Mapping[str, Rounding]]) -> None:
        super().__init__()
        self._candidates = candidates
        self.squares = {name: dict.fromkeys(each, 0.0) for name, each in candidates.items()}
        self.energy = dict.fromkeys(candidates, 0.0)

    def see(self, layer: Layer, inputs: Tensor) -> None:
        """Compare the results of all roundings on these inputs."""
        rows = self._inputs(inputs)
        for piece in layer.pieces:
            exact = layer.exact(piece)
            self.energy[layer.name] += _energy(rows @ exact.T)
            for method, rounding in self._candidates[layer.name].items():
                self.squares[layer.name][method] += _energy(rows @ (rounding.rows(piece) - exact).T)

    def relative(self, name: str, method: str) -> float:
        """Return the error of a layer's results relative to them, as a share of their energy."""
        return self.squares[name][method] / max(self.energy[name], 1e-30)


def _energy(values: Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))
