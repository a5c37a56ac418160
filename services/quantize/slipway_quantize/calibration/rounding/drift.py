"""Make up for what roundings before a layer have changed of its inputs.

Source: Li et al., "GPTAQ", arXiv 2504.02692, which rounds a weight so that its results on the inputs that rounded layers give are near to
the exact results on the exact inputs. Here the weight is corrected first and rounded then, by GPTQ or to the nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipway_quantize.calibration.streaming.layers import Weight, multiply

SHARE = 0.5
"""Share of the drift that a layer makes up for; the least-squares weight would fit the noise of a text of usual length, too."""


def correction(drift: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Return the matrix A by which a weight W is corrected to W + W · A: a share of D · M⁻¹ (K, K).

    Args:
        drift: D: the sum of products of what the exact inputs are more than the inputs (rows) and the inputs (columns). (K, K)
        order: Order of the columns, and
        factors: the upper Cholesky factor of the inverse of the inputs' damped second moments M, both as
            :func:`~slipway_quantize.calibration.rounding.gptq.error_factors` returns them.
    """
    found = torch.empty_like(drift)
    found[:, order] = multiply(multiply(drift[:, order].contiguous(), factors), factors.T.contiguous()).mul_(SHARE)
    return found


class Corrected:
    """A layer's weight, changed so that its results make up for a share of the drift of its inputs.

    Args:
        weight: The layer's own weight. (N, K)
        change: As :func:`correction` returns it. (K, K)
    """

    def __init__(self, weight: Weight, change: Tensor) -> None:
        self._weight = weight
        self._change = change.T.contiguous()

    @property
    def pieces(self) -> tuple[slice, ...]:
        """The rows that are worked on at once."""
        return self._weight.pieces

    def exact(self, rows: slice) -> Tensor:
        """Return rows of the corrected weight in float32."""
        own = self._weight.exact(rows)
        return own + multiply(own, self._change)
