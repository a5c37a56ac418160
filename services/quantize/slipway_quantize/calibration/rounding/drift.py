"""Make up for what roundings before a layer have changed of its inputs.

Source: Li et al., "GPTAQ", arXiv 2504.02692, which rounds a weight so that its results on the inputs that rounded layers give are near to
the exact results on the exact inputs. Here the weight is corrected first and rounded then, by GPTQ or to the nearest.
"""

from __future__ import annotations

from torch import Tensor

from slipway_quantize.calibration.streaming.layers import Weight
from slipway_quantize.calibration.streaming.products import multiply

SHARE = 0.5
"""Share of the drift that a layer makes up for; the least-squares weight would fit the noise of a text of usual length, too."""


class Corrected:
    """A layer's weight W, changed so that its results make up for a share of the drift of its inputs: W + share · W · D · M⁻¹.

    Args:
        weight: The layer's own weight W. (N, K)
        drift: D: the sum of products of what the exact inputs are more than the inputs (rows) and the inputs (columns). (K, K)
        order: Order of the columns, and
        factors: the upper Cholesky factor of the inverse of the inputs' damped second moments M, both as
            :func:`~slipway_quantize.calibration.rounding.gptq.error_factors` returns them.
    """

    def __init__(self, weight: Weight, drift: Tensor, order: Tensor, factors: Tensor) -> None:
        self._weight = weight
        self._drift = drift.T.contiguous()
        self._order, self._factors = order, factors
        self._back = factors.T.contiguous()
        self._whole = self._corrected(weight.pieces[0]) if len(weight.pieces) == 1 else None

    @property
    def pieces(self) -> tuple[slice, ...]:
        """The rows that are worked on at once."""
        return self._weight.pieces

    def exact(self, rows: slice) -> Tensor:
        """Return rows of the corrected weight in float32."""
        return self._corrected(rows) if self._whole is None else self._whole[rows]

    def _corrected(self, rows: slice) -> Tensor:
        found = self._weight.exact(rows)
        ahead = multiply(found, self._drift)[:, self._order].contiguous()
        found[:, self._order] += SHARE * multiply(multiply(ahead, self._factors), self._back)
        return found
