"""Make inputs for a graph from what it declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from slipway_onnx_export.names import FEATURES

_FLOATS: Mapping[int, np.dtype[Any]] = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
}


class UnknownAxisError(Exception):
    """An input has an axis that has no size here. The message names both."""


def make_feed(
    inputs: Iterable[Any], sizes: Mapping[str, int], *, past: int, end: int | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Make inputs without padding.

    Args:
        inputs: A graph's declared inputs.
        sizes: Sizes of the axes that vary, by name.
        past: Tokens before those of the call.
        end: Token that ends a text, if the model has one.

    Raises:
        UnknownAxisError: An axis is not among the sizes.
    """
    random = np.random.default_rng(0)
    feed: dict[str, npt.NDArray[Any]] = {}
    for value in inputs:
        kind = value.type.tensor_type
        shape = []
        for axis in kind.shape.dim:
            if axis.dim_param and axis.dim_param not in sizes:
                raise UnknownAxisError(f"the input {value.name} has an axis {axis.dim_param}")
            shape.append(sizes[axis.dim_param] if axis.dim_param else axis.dim_value)
        if kind.elem_type in _FLOATS:
            scale = 1.0 if value.name == FEATURES else 0.1
            feed[value.name] = (scale * random.standard_normal(shape)).astype(_FLOATS[kind.elem_type])
        elif kind.elem_type == onnx.TensorProto.BOOL:  # whether there is a cache
            feed[value.name] = np.full(shape, past > 0)
        elif value.name.endswith("mask"):
            feed[value.name] = np.ones(shape, np.int64)
        elif value.name == "position_ids":
            feed[value.name] = np.broadcast_to(np.arange(past, past + shape[-1]), shape).copy()
        elif value.name == "token_type_ids":
            feed[value.name] = np.zeros(shape, np.int64)
        else:
            feed[value.name] = tokens(shape[0], shape[1], end)
    return feed


def tokens(rows: int, count: int, end: int | None = None) -> npt.NDArray[Any]:
    """Make tokens that are the same in each row, (rows, count); the last is the end of the text, which some classifiers look for."""
    row = 3 + np.arange(count) % 5
    if end is not None:
        row = np.where(row == end, 8, row)
        row[-1] = end
    return np.broadcast_to(row, (rows, count)).astype(np.int64)
