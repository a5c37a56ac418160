"""Observe the inputs of layers: their second moments, and the errors that rounded weights cause on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import Tensor

from slipway_quantize.calibration.streaming.layers import Layer, Rounding, Weight, multiply


class Reached(Exception):  # noqa: N818 - nothing is wrong
    """A computation has given all that is wanted, and ends."""


class Observer(ABC):
    """Observes layers while a block computes. Once all were seen, the computation of a batch ends, unless ``see`` is replaced.

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
        """Observe a layer's inputs.

        Raises:
            Reached: It was the last layer.
        """
        self._note(layer, inputs)
        self._waiting.discard(layer.name)
        if not self._waiting:
            raise Reached

    def _sees_all(self, inputs: Tensor) -> bool:
        """Return whether inputs are those of every position of the batch, in order; an expert sees some."""
        return inputs.dim() == 3 and any(inputs.shape[:2] == mask.shape for mask in self._masks)

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
        """Observe a layer's inputs."""


class Inputs(Observer):
    """The inputs of one batch; layers with the same inputs share them.

    Args:
        names: Names of the layers.
        to_the_end: Whether the block computes its results once all layers were seen.

    Attributes:
        found: Inputs at all positions with text, by the name of the first layer that has them. (K, positions)
    """

    def __init__(self, names: Iterable[str], *, to_the_end: bool) -> None:
        super().__init__(names)
        self.found: dict[str, Tensor] = {}
        self._to_the_end = to_the_end
        self._last: Tensor | None = None
        self._seen: set[str] = set()

    def begin(self, masks: tuple[Tensor, ...]) -> None:
        """Expect another batch."""
        super().begin(masks)
        self.found, self._last, self._seen = {}, None, set()

    def see(self, layer: Layer, inputs: Tensor) -> None:
        """Keep a layer's inputs.

        Raises:
            Reached: It was the last layer, and the block does not compute to its end.
        """
        with suppress(Reached) if self._to_the_end else nullcontext():
            super().see(layer, inputs)

    def _note(self, layer: Layer, inputs: Tensor) -> None:
        if self._last is inputs:
            return
        self._last = inputs
        if layer.name in self._seen:  # it computes twice, so it is unknown which inputs belong together
            self.found.pop(layer.name, None)
        elif self._sees_all(inputs):
            self.found[layer.name] = self._inputs(inputs).T.contiguous()
        self._seen.add(layer.name)


class Moments(Observer):
    """Sums of the inputs' products; layers with the same inputs share them.

    Attributes:
        sums: By the name of the first layer with these inputs. (K, K)
        drifts: By the same name, if the exact inputs were given: sums of the products of the exact inputs minus the inputs (rows) with
            the inputs (columns). (K, K)
        shared: The name of that layer for each layer.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.sums: dict[str, Tensor] = {}
        self.drifts: dict[str, Tensor] = {}
        self.shared: dict[str, str] = {}
        self._last: tuple[Tensor, str] | None = None
        self._exact: Mapping[str, Tensor] = {}

    def begin(self, masks: tuple[Tensor, ...], exact: Mapping[str, Tensor] | None = None) -> None:
        """Expect another batch, whose inputs would be ``exact`` if nothing were rounded, as :class:`Inputs` finds them."""
        super().begin(masks)
        self._last, self._exact = None, exact or {}

    def _note(self, layer: Layer, inputs: Tensor) -> None:
        if self._last is not None and self._last[0] is inputs:
            self.shared[layer.name] = self._last[1]
            return
        self._last = inputs, layer.name
        self.shared[layer.name] = layer.name
        columns = self._inputs(inputs).T.contiguous()  # (K, positions)
        _add(self.sums, layer.name, multiply(columns, columns))
        if layer.name in self._exact:
            _add(self.drifts, layer.name, multiply(self._exact[layer.name] - columns, columns))

    def of(self, name: str) -> Tensor:
        """Return the sums for a layer."""
        return self.sums[self.shared[name]]

    def drift_of(self, name: str) -> Tensor | None:
        """Return the drifts for a layer, if the exact inputs were given."""
        return self.drifts.get(self.shared[name])


def _add(sums: dict[str, Tensor], name: str, products: Tensor) -> None:
    sums[name] = sums[name].add_(products) if name in sums else products


def merge_moments(parts: Sequence[Moments]) -> Moments:
    """Return the sums of several observers of the same layers, added in their order."""
    first = parts[0]
    for part in parts[1:]:
        first.shared |= part.shared
        for sums, more in ((first.sums, part.sums), (first.drifts, part.drifts)):
            for name, products in more.items():
                _add(sums, name, products)
    return first


def relative_errors(wanted: Weight, candidates: Mapping[str, Rounding], moments: Tensor) -> dict[str, float]:
    """Return the error that each rounding adds to a layer's results, as a share of their energy.

    Args:
        wanted: The weight that the roundings should be near to.
        candidates: Roundings of its weight, by method.
        moments: Second moments of its inputs. (K, K)
    """
    energy, squares = 0.0, dict.fromkeys(candidates, 0.0)
    for rows in wanted.pieces:
        exact = wanted.exact(rows)
        energy += _energy(exact, moments)
        for method, rounding in candidates.items():
            squares[method] += _energy(rounding.rows(rows) - exact, moments)
    return {method: error / max(energy, 1e-30) for method, error in squares.items()}


def _energy(weight: Tensor, moments: Tensor) -> float:
    """Return the sum of the squares of the results that a weight has on the inputs. (N, K), (K, K)."""
    return max(0.0, float((multiply(weight, moments) * weight).sum(dtype=torch.float64)))
