"""What forms that round with torch share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipway_quantize.pieces import Squares


def as_bytes(values: Tensor) -> NDArray[Any]:
    """Return the bytes of a tensor, row by row."""
    return values.contiguous().view(torch.uint8).numpy()


def squares_of(exact: Tensor, values: Tensor) -> Squares:
    """Return the sums of squares of the rounding error of float32 weights, and of the weights."""
    error, energy = (values - exact).numpy(), exact.numpy()
    return float(np.square(error).sum(dtype=np.float64)), float(np.square(energy).sum(dtype=np.float64))
