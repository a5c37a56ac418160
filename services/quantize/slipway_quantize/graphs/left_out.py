"""Weights that a graph leaves out, read row by row from the model when they are quantized."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipway.errors import QuantizationError
from slipway.model.dtypes import FLOATS
from slipway.model.graphs.weights import LeftOut, LeftOutWeights
from slipway.model.weights.reading import Weights, has_weights, open_weights
from slipway.texts import quoted


class LeftOutSource:
    """The weights that the graphs of a folder leave out, opened for reading; none if the graphs have all weights.

    Args:
        folder: The graphs' folder.
        inputs: Inputs of the task, with the model among them.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` if the description or the model cannot be read.
        QuantizationError: ``ONNX_INVALID`` if the model is missing.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Path]) -> None:
        self._described = None if has_weights(folder) else LeftOutWeights.read(folder)
        self._weights: Weights | None = None
        if self._described is not None:
            if self._described.model not in inputs:
                raise _invalid_error(f"the input {quoted(self._described.model)} with the model is missing")
            self._weights = open_weights(inputs[self._described.model], inputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._weights is not None:
            with closing(self._weights):
                pass

    def put_in(self, model: ir.Model, file: str) -> int:
        """Turn the inputs of a graph that are weights into initializers; return their size in the graph's type, in bytes.

        Raises:
            QuantizationError: ``ONNX_INVALID`` if a weight does not fit the graph.
        """
        if self._described is None or self._weights is None:
            return 0
        inputs = {value.name: value for value in model.graph.inputs}
        made: dict[int, ir.Value] = {}
        for name, place in self._described.graphs.get(file, {}).items():
            value, info = inputs.get(name), self._weights.tensors.get(place.tensor)
            shape = [int(size) if isinstance(size, int) else -1 for size in value.shape or ()] if value else []
            wanted = [] if info is None or len(info.shape) != 2 else [place.rows, info.shape[1]]
            if (
                value is None
                or info is None
                or info.dtype not in FLOATS
                or value.dtype != ir.DataType.FLOAT
                or shape != (wanted[::-1] if place.transposed else wanted)
                or place.first + place.rows > info.shape[0]
                or place.index in made
            ):
                raise _invalid_error(
                    f"the weight {name!r} of {file} is not rows of the model's tensor {place.tensor!r}"
                )
            model.graph.inputs.remove(value)
            value.const_value = LeftOutTensor(self._weights, place, info.shape[1], name=name)
            made[place.index] = value
        kept = list(model.graph.initializers.values())
        for index in sorted(made):
            kept.insert(index, made[index])
        model.graph.initializers.clear()
        for value in kept:
            model.graph.register_initializer(value)
        return sum(value.const_value.nbytes for value in made.values() if value.const_value is not None)


class LeftOutTensor(ir.LazyTensor):
    """A matrix that a graph leaves out, as float32.

    Args:
        weights: Weights of the model.
        place: The matrix.
        columns: Number of its columns in the model.
        name: Its name in the graph.
    """

    def __init__(self, weights: Weights, place: LeftOut, columns: int, *, name: str) -> None:
        shape = (columns, place.rows) if place.transposed else (place.rows, columns)
        super().__init__(self._read, ir.DataType.FLOAT, ir.Shape(shape), name=name)
        self._weights, self._place, self._columns = weights, place, columns
        self._whole: NDArray[Any] | None = None
        self._lock = threading.Lock()

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is the same for the same matrix."""
        place = self._place
        return place.tensor, place.first, place.rows, place.transposed

    @property
    def values(self) -> LazyMatrix:
        """Return the values, which are read when they are made an array."""
        stored = LazyMatrix(self, slice(0, self._place.rows), slice(0, self._columns))
        return stored.T if self._place.transposed else stored

    def read(self, rows: slice, columns: slice) -> NDArray[Any]:
        """Return a part of the model's matrix in the model's type."""
        first = self._place.first
        if columns == slice(0, self._columns):
            return self._weights.rows(self._place.tensor, first + rows.start, rows.stop - rows.start)
        with self._lock:  # rows may be computed while they are read: read them once for all columns
            if self._whole is None:
                self._whole = self._weights.rows(self._place.tensor, first, self._place.rows)
        return self._whole[rows, columns]

    def _read(self) -> ir.TensorProtocol:
        return ir.tensor(np.asarray(self.values, np.float32))


class LazyMatrix:
    """A part of a matrix, read when it is made an array. It has the methods of an array that pieces of weights need.

    Args:
        tensor: The matrix.
        rows: Rows of it, as the model has them.
        columns: Columns of it.
        transposed: Whether this is the transposed part.
    """

    ndim = 2

    def __init__(self, tensor: LeftOutTensor, rows: slice, columns: slice, *, transposed: bool = False) -> None:
        self._tensor, self._rows, self._columns, self._transposed = tensor, rows, columns, transposed

    @property
    def T(self) -> LazyMatrix:  # noqa: N802 - numpy's name
        """Return the transposed matrix."""
        return LazyMatrix(self._tensor, self._rows, self._columns, transposed=not self._transposed)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns."""
        rows, columns = (int(axis.stop - axis.start) for axis in (self._rows, self._columns))
        return (columns, rows) if self._transposed else (rows, columns)

    @property
    def size(self) -> int:
        """Return the number of values."""
        return self.shape[0] * self.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, piece: slice) -> LazyMatrix:
        """Return some rows; they are still not read."""
        axis = self._columns if self._transposed else self._rows
        start, stop, _ = piece.indices(len(self))
        part = slice(axis.start + start, axis.start + stop)
        rows, columns = (self._rows, part) if self._transposed else (part, self._columns)
        return LazyMatrix(self._tensor, rows, columns, transposed=self._transposed)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Read the values."""
        del copy
        made = self._tensor.read(self._rows, self._columns)
        made = made.T if self._transposed else made
        return made if dtype is None else made.astype(dtype)


def _invalid_error(message: str) -> QuantizationError:
    return QuantizationError(
        message, reason="ONNX_INVALID", remedy="export the ONNX model again, and give this stage that export's inputs"
    )
