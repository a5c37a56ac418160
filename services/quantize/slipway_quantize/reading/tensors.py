"""Read the weights of a Hugging Face folder, stored or left out, a few rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipway.errors import QuantizationError
from slipway.model.dtypes import FLOATS, numpy_dtypes, torch_dtypes
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights import reading
from slipway.model.weights.reading import Weights
from slipway_quantize.grid import rounding

DTYPES = torch_dtypes(*FLOATS, "I64", "I32", "I16", "I8", "U8", "BOOL")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_tensors(weights: Weights) -> dict[str, TensorInfo]:
    """Return the tensors of a folder by name, file by file and sorted within each; no weight is read.

    Raises:
        QuantizationError: ``DTYPE_UNSUPPORTED`` for 8-bit floats and the like.
    """
    tensors = sorted(weights.tensors.values(), key=lambda tensor: (tensor.file.name, tensor.name))
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise QuantizationError(
                f"tensor {tensor.name!r} in {tensor.file.name} has the data type {tensor.dtype}, which cannot be converted",
                reason="DTYPE_UNSUPPORTED",
                remedy="start from weights in float32, bfloat16 or float16",
                about={"tensor": tensor.name, "file": tensor.file.name},
            )
    return {tensor.name: tensor for tensor in tensors}


def read_rows(weights: Weights, tensor: TensorInfo, first: int, count: int) -> Tensor:
    """Return rows of a tensor; a scalar is one row."""
    values = np.ascontiguousarray(weights.rows(tensor.name, first, count))
    return torch.from_numpy(values.reshape(-1).view(np.uint8)).view(DTYPES[tensor.dtype]).reshape(values.shape)


def mapped(tensor: TensorInfo) -> Tensor:
    """Return a stored tensor whose values are read from its file when they are used."""
    raw = torch.from_numpy(reading.mapped(tensor).reshape(-1).view(np.uint8))
    return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def as_array(values: Tensor) -> NDArray[Any]:
    """Return a float tensor as an array of the same memory."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.uint16).numpy().view(numpy_dtypes("BF16")["BF16"])
    array: NDArray[Any] = values.numpy()
    return array


def require_finite(values: Tensor, name: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS``.
    """
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        rounding.require_finite(as_array(values), name)


def cast_to_half(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert finite ``values`` to ``dtype``; a value beyond its range is an error and never becomes infinity.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS`` or ``WEIGHT_OVERFLOW``.
    """
    require_finite(values, name)
    cast = values.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        largest = float(values.abs().max())
        raise QuantizationError(
            f"tensor {name!r} holds {largest:.6g}, beyond the range of {dtype} (at most {torch.finfo(dtype).max:.6g})",
            reason="WEIGHT_OVERFLOW",
            remedy="use bf16, which has the range of float32, or int8",
            about={"tensor": name, "largest": largest, "dtype": str(dtype).removeprefix("torch.")},
        )
    return cast
