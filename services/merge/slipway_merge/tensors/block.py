"""The working memory of one thread."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slipway_merge.tensors.tensor_io import Array


class Block:
    """A thread's working memory for one block of a weight.

    It is reused for every block, so that it stays in the processor's cache and no page is mapped again.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}

    def array(self, use: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return an array for a use, valid until the next call for the same use. Its content is undefined."""
        size = math.prod(shape) * dtype.itemsize
        if use not in self._memory or self._memory[use].nbytes < size:
            self._memory[use] = np.empty(size, np.uint8)
        return self._memory[use][:size].view(dtype).reshape(shape)
