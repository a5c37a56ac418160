"""Observe the inputs of layers: their second moments, and what a rounding of the weights does with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slipway_quantize.calibration.streaming.layers import Layer, Rounding


class Observer(ABC):
    """What is seen while a block computes.

    Attributes:
        mask: 1 for positions with text in the batch that is computed. (windows, tokens)
    """

    def __init__(self) -> None:
        self.mask = torch.ones(0, 0)

    def _inputs(self, inputs: Tensor) -> Tensor:
        """Return the inputs at positions with text. (positions, K)."""
        if inputs.dim() == 3 and inputs.shape[:2] == self.mask.shape:
            return inputs[self.mask == 1]
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

    @abstractmethod
    def see(self, layer: Layer, inputs: Tensor) -> None:
        """Take notice of a layer's inputs."""


class Moments(Observer):
    """Sums of the inputs' products; layers with the same inputs share them.

    Attributes:
        sums: By the name of the first layer with these inputs. (K, K)
        shared: The name of that layer for each layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Tensor] = {}
        self.shared: dict[str, str] = {}
        self._last: tuple[Tensor, str] | None = None

    def see(self, layer: Layer, inputs: Tensor) -> None:
        """Add the products of these inputs."""
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
