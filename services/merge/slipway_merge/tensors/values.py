"""The values of a planned merge: for every output tensor its stored source and the update added to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from slipway.model.safetensors_file import TensorInfo


@dataclass(frozen=True, slots=True)
class Factor:
    """One matrix of a low-rank product, possibly to be transposed first."""

    info: TensorInfo
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Shape in the product."""
        first, second = self.info.shape
        return (second, first) if self.transposed else (first, second)


@dataclass(frozen=True, slots=True)
class Update:
    """``scaling · left @ right``, added to a weight of the same shape. left: (rows, r), right: (r, columns)."""

    module: str
    left: Factor
    right: Factor
    rank: int
    scaling: float

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the product."""
        return (self.left.shape[0], self.right.shape[1])


@dataclass(frozen=True, slots=True)
class Computed:
    """A weight that is computed as a whole, not as a sum by rows; one output tensor at a time.

    Attributes:
        module: The adapter's module.
        form: The form that computes it, for the report: ``dora``, ``loha`` …
        compute: Returns all values in the shape of the output tensor, computed in the given type (float32 or float64).
        error: Returns the written tensor's error against an independent computation, in units of rounding; None if there is no
            independent computation.
    """

    module: str
    form: str
    compute: Callable[[np.dtype[np.floating]], np.ndarray]
    error: Callable[[TensorInfo], float] | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """Content of an output tensor: stored bytes (of the base, or of the adapter for a replaced tensor), with an update added or
    replaced by computed values.
    """

    source: TensorInfo
    update: Update | None = None
    computed: Computed | None = None

    @property
    def changed(self) -> bool:
        """Whether it is more than stored bytes."""
        return self.update is not None or self.computed is not None


#: Returns a weight's value after the adapter's change, given its present tensor.
Alteration = Callable[[TensorInfo], Value]


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Output tensors by name, in the base's order, and the resulting changes of the configuration.

    Attributes:
        values: Content of every output tensor.
        untied: Tied weights became different, so ``tie_word_embeddings`` must be false.
        vocab_size: New number of embedding rows if the vocabulary was resized.
        replaced: Names of the output tensors taken whole from the adapter.
        warnings: Warnings for the user.
        layers: For each layer of a deepened model, the base layer that it copies; empty for any other.
    """

    values: Mapping[str, Value]
    untied: bool = False
    vocab_size: int | None = None
    replaced: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
