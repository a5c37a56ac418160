"""What a planned merge is made of: for every output tensor, the stored bytes it comes from and the update added to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from slipway.models.safetensors_file import TensorInfo


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
    """A weight whose new values are not a sum by rows: computed whole, for one output tensor at a time.

    Attributes:
        module: The adapter's module.
        form: What computes it, for the report: ``dora``, ``loha`` …
        compute: From the type to compute in (float32 or float64) to all values, in the shape of the output tensor.
        error: From where the values are written to how far they are from what base and adapter give in another way than
            ``compute``, as a share of what rounding explains; None where there is no other way.
    """

    module: str
    form: str
    compute: Callable[[np.dtype[np.floating]], np.ndarray]
    error: Callable[[TensorInfo], float] | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """What an output tensor holds: stored bytes (of the base, or of the adapter for a replaced tensor), plus an update or
    overwritten by computed values.
    """

    source: TensorInfo
    update: Update | None = None
    computed: Computed | None = None

    @property
    def changed(self) -> bool:
        """Whether it is anything but stored bytes."""
        return self.update is not None or self.computed is not None


#: From what a weight holds so far to what it holds after the adapter's change.
Alteration = Callable[[TensorInfo], Value]


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Output tensors by name, in the base's order, and what follows for the configuration.

    Attributes:
        values: What every output tensor holds.
        untied: Tied weights became different, so that ``tie_word_embeddings`` must be false.
        vocab_size: New number of embedding rows when the vocabulary was resized.
        replaced: Names of the output tensors taken whole from the adapter.
        warnings: What the user should know.
        layers: For each layer of a model that became deeper, the base's layer it is a copy of; empty for any other.
    """

    values: Mapping[str, Value]
    untied: bool = False
    vocab_size: int | None = None
    replaced: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
