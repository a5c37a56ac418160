"""Observe the inputs of layers: their second moments, and what a rounding of the weights does with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slipway_quantize.calibration.streaming.layers import Layer, Rounding


class Reached(Exception):  # noqa: N818 - nothing is wrong
    """All that is wanted of a computation is there."""


class Observer(ABC):
    """What is seen while a block computes; once all layers were seen, the computation of a batch ends.

    Args:
        names: Names of the layers.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._waiting: set[str] = set()
        self._masks: tuple[Tensor, ...] = ()

    def begin(self, masks: tuple[Tensor, ...]) -> None:
        """Expect a batch with these masks, 1 for positions with text; each of another length. (windows, tokens)."""
        self._masks, self._waiting = masks, set(self._names)

    def see(self, layer: Layer, inputs: Tensor) -> None:
        """Take notice of a layer's inputs.

        Raises:
            Reached: It was the last layer.
        """
        self._note(layer, inputs)
        self._waiting.discard(layer.name)
        if not self._waiting:
            raise Reached

    def _inputs(self, inputs: Tensor) -> Tensor:
        """Return the inputs at positions with text. (positions, K)."""
        for mask in self._masks:
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

    @abstractmethod
    def _note(self, layer: Layer, inputs: Tensor) -> None:
        """Take notice of a layer's inputs."""


class Moments(Observer):
    """Sums of the inputs' products; layers with the same inputs share them.

    Attributes:
        sums: By the name of the first layer with these inputs. (K, K)
        shared: The name of that layer for each layer.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.sums: dict[str, Tensor] = {}
        self.shared: dict[str, str] = {}
        self._last: tuple[Tensor, str] | None = None

    def begin(self, masks: tuple[Tensor, ...]) -> None:
        """Expect another batch."""
        super().begin(masks)
        self._last = None

    def _note(self, layer: Layer, inputs: Tensor) -> None:
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
        super().__init__(candidates)
        self._candidates = candidates
        self.squares = {name: dict.fromkeys(each, 0.0) for name, each in candidates.items()}
        self.energy = dict.fromkeys(candidates, 0.0)

    def _note(self, layer: Layer, inputs: Tensor) -> None:
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
