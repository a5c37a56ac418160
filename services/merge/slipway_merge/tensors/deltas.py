"""The arithmetic of a merge: blocks of rows, exact to one rounding.

A 16-bit result is computed in float32 and rounded once; a float32 result is computed in float64 and rounded once. So the
result is the representable value nearest to ``W + scaling · B @ A``. Only for a near tie, or if W and the update nearly cancel, can
the wider type's own error (2⁻²³ of W for float32) select its neighbour.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipway.model.dtypes import DTYPES
from slipway_merge.tensors.kernel import Block, Kernel, convert, kernel
from slipway_merge.tensors.outputs import Factor, Update
from slipway_merge.tensors.tensor_io import FLOAT_TYPES, Array, TensorReader, check_finite, is_finite


@dataclass
class Change:
    """Statistics of one weight's change, summed over its blocks.

    Attributes:
        module: The adapter's module.
        tensor: Name of the output tensor.
        form: The adapter's form: ``lora`` for an update by rows, otherwise the form that computed the weight.
        rank: Rank of the pair; None for other forms.
        scaling: Factor of its product; None for other forms.
        change_sum: Sum of squares of the update.
        weight_sum: Sum of squares of the base weight.
        changed: Elements whose stored value changed.
        total: Elements.
    """

    module: str
    tensor: str
    form: str = "lora"
    rank: int | None = None
    scaling: float | None = None
    change_sum: float = 0.0
    weight_sum: float = 0.0
    changed: int = 0
    total: int = 0

    def blank(self) -> Change:
        """Return an empty count for a part of the weight."""
        return Change(self.module, self.tensor)

    def add(self, part: Change) -> None:
        """Add the count of a part of the weight."""
        self.change_sum += part.change_sum
        self.weight_sum += part.weight_sum
        self.changed += part.changed
        self.total += part.total

    def extend(self, elements: int) -> None:
        """Take the count of some rows for that of all elements; a weight of which something changed stays changed."""
        if self.total in (0, elements):
            return
        share = elements / self.total
        self.weight_sum *= share
        self.changed = max(min(self.changed, 1), round(self.changed * share))
        self.total = elements

    @property
    def relative_change(self) -> float:
        """Norm of the update against the norm of the base weight (0 for an update of zeros, inf for a weight of zeros)."""
        if self.weight_sum == 0.0:
            return math.inf if self.change_sum else 0.0
        return math.sqrt(self.change_sum / self.weight_sum)

    @property
    def unchanged_share(self) -> float:
        """Share of the elements that are unchanged after rounding."""
        return 1.0 - self.changed / self.total if self.total else 1.0


def compute_type(output: str, source: str) -> np.dtype[Any]:
    """Return the type to compute in: float64 if the output has 32 bits or more or the source more than 32, otherwise float32.

    Args:
        output: Safetensors name of the output's type.
        source: Safetensors name of the source's type.
    """
    return np.dtype(np.float64 if DTYPES[output].bits >= 32 or DTYPES[source].bits > 32 else np.float32)


def arithmetic() -> str:
    """Return the name of the arithmetic for low-rank updates of bfloat16 weights: the kernel's instructions, or ``numpy``."""
    compiled = kernel()
    return compiled.name if compiled else "numpy"


class LowRank:
    """The factors of one update in the type of the computation, read on first use and checked to be finite. Shared by threads."""

    def __init__(self, update: Update, reader: TensorReader, dtype: np.dtype[Any]) -> None:
        self._update = update
        self._reader = reader
        self._dtype = dtype
        self._lock = threading.Lock()
        self._factors: tuple[Array, Array] | None = None
        self._panels: Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the factors take, including what reading them takes."""
        return (self._update.left.info.numel + self._update.right.info.numel) * (self._dtype.itemsize + 16)

    def factors(self) -> tuple[Array, Array]:
        """Return left (rows, r), multiplied by the scaling, and right (r, columns).

        Raises:
            ModelMergeError: ``NON_FINITE_WEIGHTS`` or ``DTYPE_UNSUPPORTED``.
        """
        with self._lock:
            if self._factors is None:
                left, right = _factor(self._update.left, self._reader), _factor(self._update.right, self._reader)
                scaled = np.ascontiguousarray(left.astype(np.float64) * self._update.scaling, self._dtype)
                self._factors = scaled, np.ascontiguousarray(right, self._dtype)
            return self._factors

    def panels(self, kernel: Kernel) -> Array:
        """Return the right factor in the kernel's layout."""
        right = self.factors()[1]
        with self._lock:
            if self._panels is None:
                self._panels = kernel.panels(right)
            return self._panels

    def square(self) -> float:
        """Return the sum of squares of the product, from the r × r Gram matrices: ‖LR‖² = tr((LᵀL)(RRᵀ))."""
        left, right = (factor.astype(np.float64) for factor in self.factors())
        return max(float(((left.T @ left) * (right @ right.T)).sum()), 0.0)


def is_zero(update: Update, reader: TensorReader) -> bool:
    """Return whether a product is zero because one factor is zero (in an untrained adapter, B is).

    Raises:
        ModelMergeError: ``NON_FINITE_WEIGHTS`` or ``DTYPE_UNSUPPORTED``.
    """
    return not all(_factor(factor, reader).any() for factor in (update.left, update.right))


def _factor(factor: Factor, reader: TensorReader) -> Array:
    values = reader.read(factor.info)
    check_finite(values, factor.info.dtype, name=factor.info.name, where="the adapter")
    return values.T if factor.transposed else values


def merge_block(
    base: Array, low_rank: LowRank, *, first_row: int, source: str, output: str, block: Block, change: Change
) -> Array:
    """Return the rows of a weight after a low-rank update, rounded once; as :func:`round_block`.

    Args:
        base: Stored values of the rows. (rows, columns)
        low_rank: The update of the whole weight.
        first_row: Number of the first row.
        source: Safetensors name of their type.
        output: Safetensors name of the type to round to.
        block: Working memory.
        change: Statistics of the whole weight.
    """
    left, right = low_rank.factors()
    if first_row == 0:
        change.change_sum += low_rank.square()
    rows = left[first_row : first_row + len(base)]
    if source == output == "BF16" and (compiled := kernel()):
        rounded = block.array("rounded", base.dtype, base.shape)
        counts = compiled.merge(base, rows, low_rank.panels(compiled), out=rounded)
        if counts.finite:  # otherwise numpy computes it again, below, and names the tensor
            change.weight_sum += counts.weight_sum
            change.changed += counts.changed
            change.total += base.size
            return rounded

    def add(wide: Array, spare: Array) -> Array:
        np.matmul(rows, right, out=spare)
        return np.add(spare, wide, out=spare)

    return round_block(base, source=source, output=output, block=block, change=change, add=add)


def round_block(
    base: Array, *, source: str, output: str, block: Block, change: Change, add: Callable[[Array, Array], Array] | None
) -> Array:
    """Return one block of rows of a weight after its change, rounded once to the output's type; update ``change``.

    Args:
        base: Stored values. (rows, columns)
        source: Safetensors name of their type.
        output: Safetensors name of the type to round to.
        block: Working memory.
        change: Statistics of the whole weight.
        add: Returns the new values from the base in the type of the computation and spare memory of the same shape;
            None if only the type changes.

    Raises:
        ModelMergeError: ``NON_FINITE_WEIGHTS`` if the base, or the result (an overflow), is not finite.
    """
    wide = block.array("wide", compute_type(output, source), base.shape)
    rounded = block.array("rounded", FLOAT_TYPES[output], base.shape)
    spare = block.array("spare", wide.dtype, base.shape)
    with np.errstate(over="ignore", invalid="ignore"):  # the checks below name the tensor
        convert(base, wide, block)
        convert(wide if add is None else add(wide, spare), rounded, block)
        if not is_finite(rounded, output):  # a non-finite base gives a non-finite result
            check_finite(base, source, name=change.tensor, where="the base model")
            check_finite(rounded, output, name=change.tensor, where="the merged result")
        if add is not None:
            _account(wide, rounded, spare, same_type=source == output, block=block, change=change)
    return rounded


def _account(wide: Array, rounded: Array, spare: Array, *, same_type: bool, block: Block, change: Change) -> None:
    """Count the elements in which a block's rounded result differs from its base in the same type."""
    flat = wide.reshape(-1)
    change.weight_sum += float(np.dot(flat, flat))
    if not same_type:  # the base as the output's type holds it
        stored = block.array("stored", rounded.dtype, wide.shape)
        convert(wide, stored, block)
        convert(stored, wide, block)
    convert(rounded, spare, block)  # as numbers, not bits: two zeros are equal
    different = np.not_equal(spare, wide, out=block.array("different", np.dtype(np.bool_), wide.shape))
    change.changed += int(np.count_nonzero(different))
    change.total += rounded.size
