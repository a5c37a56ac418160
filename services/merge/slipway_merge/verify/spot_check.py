"""Read the written files again and check their tensors and the results of some rows of each weight.

A weight with an update is multiplied by a random vector, and so is base plus adapter, unmerged (``W x + s · L (R x)``). The two may
differ only by the rounding of the written values. The sampled rows are the same in every run. A weight that was computed as a whole
is compared with an independent computation: with rows computed from the stored tensors or, if peft merged it, with the output of
peft's own layer before its merge. One tensor is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from slipway.errors import ModelMergeError
from slipway.model.safetensors_file import TensorInfo, read_weights
from slipway_merge.tensors.deltas import compute_type
from slipway_merge.tensors.outputs import Factor, Layout, OutputTensor, Update
from slipway_merge.tensors.tensor_io import (
    COMPUTING_UNITS,
    DEVIATIONS,
    FLOAT_TYPES,
    SAMPLE_ROWS,
    SMALLEST_ERROR,
    UNIT_ROUNDOFF,
    Array,
    TensorReader,
    generator,
    share_of_rounding,
    wide_roundoff,
)

_SMALL_BYTES = 1 << 24
"""Size up to which all values of a replaced tensor are compared."""


def spot_check(
    folder: Path,
    layout: Layout,
    reader: TensorReader,
    *,
    replaced: Collection[str] = (),
    on_tensor: Callable[[int, int], None],
) -> dict[str, Any]:
    """Compare the written weights with the plan; return figures for the report.

    Args:
        folder: The written model.
        layout: The planned files.
        reader: Reads base and adapter.
        replaced: Names of the tensors that the adapter replaces, such as a head.
        on_tensor: Called with the numbers of checked and of all tensors; an exception from it ends the check.

    Raises:
        ModelMergeError: ``MERGE_NOT_VERIFIED`` naming the first wrong tensor.
        CheckpointValidationError: The written files are not readable.
    """
    stored = read_weights(folder)
    planned = {tensor.name: tensor for shard in layout.shards for tensor in shard.tensors}
    for name in sorted(stored.keys() ^ planned.keys()):
        raise _difference_error(
            name, "it was planned but not written" if name in planned else "it was written but not planned"
        )
    worst = 0.0
    checked = 0
    with TensorReader() as written:
        for done, (name, tensor) in enumerate(planned.items()):
            on_tensor(done, len(planned))
            info = stored[name]
            if (info.dtype, info.shape) != (tensor.dtype, tensor.shape):
                raise _difference_error(
                    name, f"it is {info.dtype} {info.shape} instead of {tensor.dtype} {tensor.shape}"
                )
            if tensor.value.update is not None:
                worst = max(worst, _check_update(tensor, info, reader, written))
                checked += 1
            elif tensor.value.computed is not None:
                worst = max(worst, _check_computed(tensor, info, written))
                checked += 1
            elif name in replaced:
                _check_replaced(tensor, info, reader, written)
    return {"tensors": len(planned), "modules_computed": checked, "largest_error_of_tolerance": round(worst, 4)}


def _check_update(tensor: OutputTensor, info: TensorInfo, reader: TensorReader, written: TensorReader) -> float:
    """Return the largest error as a share of what rounding explains."""
    sample = UpdateSample(tensor, reader)
    return sample.error(_rows(written, info, sample.first, sample.count), sample.first)


class UpdateSample:
    """Rows of a weight with an update, and the results of base and adapter, unmerged, for them on a random input.

    Args:
        tensor: The weight.
        reader: Reads base and adapter.
    """

    def __init__(self, tensor: OutputTensor, reader: TensorReader) -> None:
        update = tensor.value.update
        assert update is not None
        random = generator(tensor.name)
        self._name, self._dtype = tensor.name, tensor.dtype
        self.count = min(SAMPLE_ROWS, tensor.shape[0])
        self.first = int(random.integers(0, tensor.shape[0] - self.count + 1))
        self._vector = random.standard_normal(math.prod(tensor.shape[1:]))
        self._expected = _rows(reader, tensor.value.source, self.first, self.count) @ self._vector + _update_rows(
            update, reader, self.first, self.count
        ) @ (_factor(update.right, reader) @ self._vector)

    def error(self, merged: Array, first: int) -> float:
        """Return the largest error of merged rows as a share of what rounding explains.

        Args:
            merged: Rows of the sample, in float64. (rows, columns)
            first: Number of the first of these rows in the weight.

        Raises:
            ModelMergeError: ``MERGE_NOT_VERIFIED`` if it is above 1.
        """
        expected = self._expected[first - self.first :][: len(merged)]
        error = np.abs(merged @ self._vector - expected)
        tolerance = _tolerance(self._dtype, merged, self._vector)
        share = float((error / tolerance).max())
        if not share <= 1.0:
            row = int((error / tolerance).argmax())
            raise _difference_error(
                self._name,
                f"on a random input its row {first + row} computes {(merged @ self._vector)[row]:.6g} where base and adapter compute "
                f"{expected[row]:.6g}, {share:.1f} times what rounding explains",
            )
        return share


def _check_computed(tensor: OutputTensor, info: TensorInfo, written: TensorReader) -> float:
    """Return the largest error as a share of what rounding explains."""
    computed = tensor.value.computed
    assert computed is not None
    if computed.error is not None:
        share = computed.error(info)
    else:  # its layer's input is unknown, so only the writing is checked
        expected = computed.compute(compute_type(tensor.dtype, tensor.value.source.dtype))
        share = share_of_rounding(written.read(info).astype(np.float64), expected.astype(np.float64), tensor.dtype)
    if not share <= 1.0:
        raise _difference_error(tensor.name, f"on a random input it is off by {share:.1f} times what rounding explains")
    return share


def _check_replaced(tensor: OutputTensor, info: TensorInfo, reader: TensorReader, written: TensorReader) -> None:
    """Check that a tensor has the adapter's values: all of them if it is small, such as a head, otherwise some rows."""
    if not math.prod(tensor.shape) or not {tensor.dtype, tensor.value.source.dtype} <= UNIT_ROUNDOFF.keys():
        return
    rows = tensor.shape[0] if tensor.shape else 1
    count = rows if info.nbytes <= _SMALL_BYTES else min(SAMPLE_ROWS, rows)
    first = int(generator(tensor.name).integers(0, rows - count + 1))
    values = _rows(written, info, first, count)
    share = share_of_rounding(values, _rows(reader, tensor.value.source, first, count), tensor.dtype)
    if not share <= 1.0:
        raise _difference_error(
            tensor.name, f"its values are not those that the adapter brings ({share:.1f} times the rounding)"
        )


def _tolerance(dtype: str, merged: Array, vector: Array) -> Array:
    """Return the tolerance of each row for independent rounding errors, uniform up to the largest one."""
    largest = np.abs(merged)
    # The merge was computed in a wider type, whose own error matters where base and update nearly cancel.
    computing = COMPUTING_UNITS * wide_roundoff(dtype) * np.abs(vector).sum() * largest.max()
    largest *= UNIT_ROUNDOFF[dtype]  # in place, as all that follows: new memory takes longer than the numbers in it
    np.maximum(largest, SMALLEST_ERROR[dtype], out=largest)
    largest *= vector
    deviation = np.sqrt(np.einsum("ij,ij->i", largest, largest) / 3)
    return np.asarray(DEVIATIONS * deviation + computing + 1e-300)


def _rows(reader: TensorReader, info: TensorInfo, first: int, rows: int) -> Array:
    """Return some rows of a stored tensor, seen as a matrix, in float64."""
    columns = math.prod(info.shape[1:])
    dtype = FLOAT_TYPES[info.dtype]
    buffer = np.empty(rows * columns * dtype.itemsize, np.uint8)
    reader.fill(buffer, info, first * columns * dtype.itemsize)
    return buffer.view(dtype).reshape(rows, columns).astype(np.float64)


def _factor(factor: Factor, reader: TensorReader) -> Array:
    values = reader.read(factor.info).astype(np.float64)
    return values.T if factor.transposed else values


def _update_rows(update: Update, reader: TensorReader, first: int, rows: int) -> Array:
    left = update.left
    values = _factor(left, reader)[first : first + rows] if left.transposed else _rows(reader, left.info, first, rows)
    return np.asarray(values * update.scaling)


def _difference_error(name: str, what: str) -> ModelMergeError:
    return ModelMergeError(
        f"the merged model is not as planned: tensor {name!r}: {what}",
        reason="MERGE_NOT_VERIFIED",
        remedy="run it again; if it happens again, the disk or the memory of this machine may be faulty, "
        "or this is an error in Slipway: please report it",
        about={"tensor": name},
    )
