"""Observe the inputs of layers: their second moments, and what a rounding of the weights does with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slipway_quantize.calibration.streaming.layers import Layer, Rounding
from slipway_quantize.calibration.streaming.products import multiply


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
        columns = self._inputs(inputs).T.contiguous()  # (K, positions)
        found = multiply(columns, columns)
        self.sums[layer.name] = self.sums[layer.name].add_(found) if layer.name in self.sums else found

    def of(self, name: str) -> Tensor:
        """Return the sums for a layer."""
        return self.sums[self.shared[name]]


def merge_moments(parts: Sequence[Moments]) -> Moments:
    """Return the sums of several observers of the same layers, added in their order."""
    first = parts[0]
    for part in parts[1:]:
        first.shared |= part.shared
        for name, found in part.sums.items():
            first.sums[name] = first.sums[name].add_(found) if name in first.sums else found
    return first


def relative_errors(layer: Layer, candidates: Mapping[str, Rounding], moments: Tensor) -> dict[str, float]:
    """Return what each rounding adds to a layer's results, as a share of their energy.

    Args:
        layer: The layer.
        candidates: Roundings of its weight, by method.
        moments: Second moments of its inputs. (K, K)
    """
    energy, squares = 0.0, dict.fromkeys(candidates, 0.0)
    for rows in layer.pieces:
        exact = layer.exact(rows)
        energy += _energy(exact, moments)
        for method, rounding in candidates.items():
            squares[method] += _energy(rounding.rows(rows) - exact, moments)
    return {method: found / max(energy, 1e-30) for method, found in squares.items()}


def _energy(weight: Tensor, moments: Tensor) -> float:
    """Return the sum of the squares of the results that a weight has on the inputs. (N, K), (K, K)."""
    return max(0.0, float((multiply(weight, moments) * weight).sum(dtype=torch.float64)))
