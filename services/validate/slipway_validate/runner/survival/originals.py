"""The weights of adapted modules as they should be: those of the base, without and with the update.

Axes: N output features, K input features, R some of the N.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipway_validate.runner.survival.adapted import AdaptedModule
from slipway_validate.runner.survival.checkpoints import Checkpoint
from slipway_validate.runner.survival.stored import Dense, Names, NotUnderstoodError
from slipway_validate.runner.survival.sums import Both


@dataclass(frozen=True, slots=True)
class Original:
    """A module's whole weight in the base, and with its update.

    Attributes:
        before: W, in the type in which it is stored. (N, K)
        after: W + Δ. float32 (N, K)
    """

    before: Tensor
    after: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        return tuple(self.before.shape)

    @property
    def rounds(self) -> bool:
        """Return whether the type of W cannot hold W + Δ."""
        return self.before.dtype not in (torch.float32, torch.float64)

    def rounded(self, both: Both) -> Tensor:
        """Return W + Δ as the type of W holds it, float32 (R, K)."""
        return both.after.to(self.before.dtype).float()

    def rows(self, rows: slice) -> Both:
        """Return some rows."""
        return Both(self.before[rows].float().contiguous(), self.after[rows].contiguous())


class BaseWeights:
    """The base's weights, by the names that the model gives them."""

    def __init__(self, folder: Path) -> None:
        self._stored = Checkpoint(folder)
        self._names = Names(self._stored.names)

    def weight(self, module: AdaptedModule) -> Tensor:
        """Return W as (N, K), in its stored type.

        Raises:
            NotUnderstoodError: The base stores it under another name or in another form.
        """
        name = self._names.find(module.weight) or (self._names.find(module.tied) if module.tied else None)
        if name is None:
            raise NotUnderstoodError("the base has no weight of this name")
        found = self._stored.weight(name, turned=module.turned)
        return found.values if isinstance(found, Dense) else found.take(slice(None)).stored

    def original(self, module: AdaptedModule) -> Original:
        """Return a module's weight without and with its update.

        Raises:
            NotUnderstoodError: As :meth:`weight`.
        """
        before = self.weight(module)
        merged = module.merged(before.T if module.turned else before)
        return Original(before, merged.T if module.turned else merged)

    def rows(self, weight: str) -> int:
        """Return the number of output features of a linear layer's weight; 0 if the base has none of this name."""
        name = self._names.find(weight)
        return self._stored.weight(name, turned=False).shape[0] if name else 0
