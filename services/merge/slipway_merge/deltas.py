"""The arithmetic of a merge: blocks of rows, exact to one rounding.

A 16-bit result is computed in float32 and rounded once; a float32 result is computed in float64 and rounded once. So the
result is the representable value nearest to ``W + scaling · B @ A``; only where that is a near tie, or W and the update all
but cancel, can the wider type's own error (2⁻²³ of W for float32) decide for its neighbour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slipway_merge.tensor_io import TensorReader, check_finite
from slipway_merge.values import Factor, Update


@dataclass
class Change:
    """What a merge did to one weight, summed over its blocks.

    Attributes:
        module: The adapter's module.
        tensor: Name of the output tensor.
        rank: Rank of the pair.
        scaling: Factor of its product.
        delta_norm: Frobenius norm of the update.
        weight_sum: Sum of squares of the base weight.
        changed: Elements whose stored value changed.
        total: Elements.
    """

    module: str
    tensor: str
    rank: int
    scaling: float
    delta_norm: float = 0.0
    weight_sum: float = 0.0
    changed: int = 0
    total: int = 0

    @property
    def relative_change(self) -> float:
        """Norm of the update against the norm of the base weight (0 for an update of zeros, inf for a weight of zeros)."""
        weight = math.sqrt(self.weight_sum)
        if weight == 0.0:
            return math.inf if self.delta_norm else 0.0
        return self.delta_norm / weight

    @property
    def unchanged_share(self) -> float:
        """Share of the elements that rounding left as they were."""
        return 1.0 - self.changed / self.total if self.total else 1.0


def compute_dtype(output: torch.dtype) -> torch.dtype:
    """Type to accumulate in for an output type: at least twice as precise."""
    return torch.float64 if output.itemsize >= 4 else torch.float32


class LowRank:
    """The factors of one update in the type of the computation, checked to be finite.

    Raises:
        ModelMergeError: ``NON_FINITE_WEIGHTS`` or ``DTYPE_UNSUPPORTED``.
    """

    def __init__(self, update: Update, reader: TensorReader, dtype: torch.dtype) -> None:
        self.update = update
        self.left = _factor(update.left, reader, dtype)  # (rows, r)
        self.right = _factor(update.right, reader, dtype)  # (r, columns)

    @property
    def is_zero(self) -> bool:
        """Whether the product is zero because one factor is (an untrained adapter: B starts as zeros)."""
        return not self.left.any() or not self.right.any()

    def norm(self) -> float:
        """Frobenius norm of ``scaling · left @ right``, from the r × r Gram matrices: ‖LR‖² = tr((LᵀL)(RRᵀ))."""
        left, right = self.left.double(), self.right.double()
        square = ((left.T @ left) * (right @ right.T)).sum().item()
        return abs(self.update.scaling) * math.sqrt(max(square, 0.0))

    def add_to(self, block: torch.Tensor, first_row: int) -> torch.Tensor:
        """``block + scaling · (left @ right)`` for the rows from ``first_row`` on. block: (rows, columns)."""
        left = self.left[first_row : first_row + block.shape[0]]
        return torch.addmm(block, left, self.right, alpha=self.update.scaling)


def _factor(factor: Factor, reader: TensorReader, dtype: torch.dtype) -> torch.Tensor:
    tensor = reader.read(factor.info)
    check_finite(tensor, factor.info.name, "the adapter")
    tensor = tensor.to(dtype)
    return tensor.T if factor.transposed else tensor


def merge_block(
    block: torch.Tensor, low_rank: LowRank, first_row: int, *, output: torch.dtype, change: Change
) -> torch.Tensor:
    """One block of rows of a merged weight, rounded once to the output's type; ``change`` is brought up to date.

    Raises:
        ModelMergeError: ``NON_FINITE_WEIGHTS`` when the base, or the result (an overflow), is not finite.
    """
    check_finite(block, change.tensor, "the base model")
    wide = block.to(compute_dtype(output))
    flat = wide.reshape(-1)
    change.weight_sum += torch.dot(flat, flat).item()
    merged = low_rank.add_to(wide, first_row).to(output)
    check_finite(merged, change.tensor, "the merged result")
    change.changed += int((merged != block.to(output)).sum().item())
    change.total += merged.numel()
    return merged
