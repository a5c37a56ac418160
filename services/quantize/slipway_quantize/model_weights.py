"""Read the weights of a transformers folder a few rows at a time, stored or left out, as numpy's arrays or torch's tensors.

Importing this module imports no torch: what rounds to integers, or only copies, needs none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipway.errors import QuantizationError
from slipway.model.dtypes import FLOATS, numpy_dtypes
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights import reading
from slipway.model.weights.reading import Weights
from slipway_quantize.grid import rounding

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_READ = numpy_dtypes(*FLOATS, "I64", "I32", "I16", "I8", "U8", "BOOL")
DTYPE_NAMES = {dtype: name for name, dtype in _READ.items()}
"""The types of tensors that are read, in a safetensors header by numpy's."""
_BF16 = _READ["BF16"]
_BF16_INFINITY = 0x7F80
"""All bits of the exponent of a bfloat16, which only infinity and NaN have."""


def limit_torch(threads: int) -> None:
    """Import torch, and let it compute in so many threads."""
    import torch

    torch.set_num_threads(threads)


def read_tensors(weights: Weights) -> dict[str, TensorInfo]:
    """Return the tensors of a folder by name, file by file and sorted within each; no weight is read.

    Raises:
        QuantizationError: ``DTYPE_UNSUPPORTED`` for 8-bit floats and the like.
    """
    tensors = sorted(weights.tensors.values(), key=lambda tensor: (tensor.file.name, tensor.name))
    for tensor in tensors:
        if tensor.dtype not in _READ:
            raise QuantizationError(
                f"tensor {tensor.name!r} in {tensor.file.name} has the data type {tensor.dtype}, which cannot be converted",
                reason="DTYPE_UNSUPPORTED",
                remedy="start from weights in float32, bfloat16 or float16",
                about={"tensor": tensor.name, "file": tensor.file.name},
            )
    return {tensor.name: tensor for tensor in tensors}


def read_rows(weights: Weights, tensor: TensorInfo, first: int, count: int) -> NDArray[Any]:
    """Return rows of a tensor, contiguous; a scalar is one row."""
    return np.ascontiguousarray(weights.rows(tensor.name, first, count))


def map_tensor(tensor: TensorInfo) -> Tensor:
    """Return a stored tensor whose values are read from its file when they are used. Imports torch."""
    return as_tensor(reading.mapped(tensor)).reshape(tensor.shape)


def as_tensor(values: NDArray[Any]) -> Tensor:
    """Return an array of a type that is read here as a tensor of the same memory. Imports torch."""
    import torch

    if values.dtype == _BF16:
        return torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def as_array(values: Tensor) -> NDArray[Any]:
    """Return a float tensor as an array of the same memory. Imports torch."""
    import torch

    if values.dtype == torch.bfloat16:
        return values.view(torch.uint16).numpy().view(_BF16)
    array: NDArray[Any] = values.numpy()
    return array


def require_finite(values: NDArray[Any], name: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS``.
    """
    if not _is_finite(values):
        rounding.require_finite(values, name)


def _is_finite(values: NDArray[Any]) -> bool:
    if values.dtype == _BF16:  # ml_dtypes looks at one value after the other
        bits = values.view(np.uint16) & _BF16_INFINITY
        return not bits.size or int(bits.max()) < _BF16_INFINITY
    return DTYPE_NAMES.get(values.dtype) not in FLOATS or bool(np.isfinite(values).all())


def cast_to_half(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert finite ``values`` to ``dtype``; a value beyond its range is an error and never becomes infinity.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS`` or ``WEIGHT_OVERFLOW``.
    """
    import torch

    cast = values.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        require_finite(as_array(values), name)
        largest = float(values.abs().max())
        raise QuantizationError(
            f"tensor {name!r} holds {largest:.6g}, beyond the range of {dtype} (at most {torch.finfo(dtype).max:.6g})",
            reason="WEIGHT_OVERFLOW",
            remedy="use bf16, which has the range of float32, or int8",
            about={"tensor": name, "largest": largest, "dtype": str(dtype).removeprefix("torch.")},
        )
    return cast
