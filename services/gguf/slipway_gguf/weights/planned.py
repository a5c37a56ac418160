"""A tensor of a file: its name and shape, and the views of the model's tensors that its values come from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.reading import mapped
from slipway_gguf.architectures.entry import WHOLE, Change, Piece

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Values from a tensor of the model.

    Attributes:
        tensor: The tensor.
        piece: Selects, orders and multiplies its values.
    """

    tensor: TensorInfo
    piece: Piece = WHOLE

    def view(self, whole: Array) -> Array:
        """Return the part's values of a tensor, in the file's order; the result may have more axes than the file's tensor."""
        return self.piece.columns(self.order(self.piece.form(whole)))

    def order(self, whole: Array) -> Array:
        """Return the part's rows of a matrix with the tensor's rows, in the file's order."""
        return self.piece.rows(self.piece.take(whole))

    def values(self) -> Array:
        """Return the values as a view of the mapped file."""
        return self.view(mapped(self.tensor))

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the part in the file; without reading values.

        Raises:
            ValueError: The tensor has other axes than the piece divides, or sizes that it does not divide.
        """
        formed = self.piece.form(np.broadcast_to(np.zeros((), np.uint8), self.tensor.shape or (1,)))
        taken = self.piece.take(formed)
        inner = tuple(int(size) for size in taken.shape[1:])
        total = self.piece.columns(self.piece.rows(taken)).size
        return (total // max(1, math.prod(inner)), *inner)


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of the file.

    Attributes:
        name: GGUF's name.
        shape: Its shape, columns last.
        parts: Sources of its values, one behind the other.
        offset: Number to add to each value.
        change: Function of each value, before the number is added.
        fixed: The values, if they come from no tensor.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    offset: float = 0.0
    change: Change = Change.NONE
    fixed: NDArray[np.float32] | None = None

    def samples(self) -> Iterator[tuple[int, Part | None, Array]]:
        """Yield blocks at the beginning, in the middle and at the end, each with the number of its first row and its part."""
        if self.fixed is not None:
            yield 0, None, self.fixed[None]
            return
        if self._is_joined_vector:
            yield 0, None, self._join_vector()
            return
        wholes = [self._rows(part) for part in self.parts]
        last = len(wholes) - 1
        places = [(0, 0), (last // 2, wholes[last // 2].shape[0] // 2), (last, wholes[last].shape[0] - 1)]
        for index, first in dict.fromkeys(places):
            before = sum(whole.size for whole in wholes[:index]) + wholes[index][:first].size
            yield before // self.shape[-1], self.parts[index], wholes[index][first : first + 1]

    def blocks(self, most: int) -> Iterator[tuple[Part | None, Array]]:
        """Yield views of blocks of whole rows, in order, each with its part.

        A block has at most ``most`` values, or one index of the first axis.
        """
        if self.fixed is not None:
            yield None, self.fixed
        if self._is_joined_vector:
            yield None, self._join_vector()
            return
        for part in self.parts:
            whole = self._rows(part)
            step = max(1, most // max(1, math.prod(whole.shape[1:])))
            for first in range(0, whole.shape[0], step):
                yield part, whole[first : first + step]

    @property
    def _is_joined_vector(self) -> bool:
        return len(self.shape) == 1 and len(self.parts) > 1

    def _join_vector(self) -> Array:
        """Return a vector's parts behind each other as one row. (1, values)."""
        factors = [np.float32(part.piece.factor) for part in self.parts]
        parts = [part.values().astype(np.float32).reshape(-1) for part in self.parts]
        return np.concatenate([values * factor for values, factor in zip(parts, factors, strict=True)])[None]

    def _rows(self, part: Part) -> Array:
        """Return a part's values with an axis for rows: a vector is one row, also of a tensor that has several."""
        whole = part.values()
        return whole[None] if len(self.shape) == 1 or whole.ndim == 1 else whole
