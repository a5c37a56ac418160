"""Read the weights of a transformers folder: dense, or packed by compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipway.model.dtypes import DTYPES, FLOATS, torch_dtypes
from slipway.model.limits import MOST_EXPERTS
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights import reading
from slipway.proof.stored_weights import Coded, Dense, NotUnderstoodError, StoredWeight, Turned, count_non_finite

_STORED = re.compile(r"(?P<weight>.+\.weight)(?P<part>_packed|)")
_BITS = range(2, 9)
"""Widths of integers that words hold one after the other."""
_SCALED = ("I8", "F8_E4M3", "F8_E5M2")
"""Types of weights that are whole numbers or small floats with a scale beside them."""
_FLOAT8 = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7C}
"""The first code above the positive values of a type."""
_FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The values of a 4-bit float that are not negative."""


class Checkpoint:
    """The weights of a folder of safetensors.

    Args:
        tensors: Its tensors by name.

    Raises:
        NotUnderstoodError: Its stacks hold more matrices than any model has.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors
        matrices = {match["weight"] for name in self._tensors if (match := _STORED.fullmatch(name))}
        stacks = {
            name: info.shape[0]
            for name, info in self._tensors.items()
            if info.dtype in FLOATS and len(info.shape) == 3 and min(info.shape) > 1  # not a convolution by channel
        }
        if sum(stacks.values()) > MOST_EXPERTS:
            raise NotUnderstoodError(
                f"its stacks hold {sum(stacks.values())} matrices, and at most {MOST_EXPERTS} are read"
            )
        self._stacks = {f"{name}.{number}": (name, number) for name in stacks for number in range(stacks[name])}
        self.names = frozenset((*matrices, *self._stacks))

    def weight(self, name: str, *, turned: bool) -> StoredWeight:
        """As :meth:`slipway.proof.stored_weights.StoredModel.weight`; a matrix of a stack has the stack's name and its number."""
        if name in self._stacks:
            stack, number = self._stacks[name]
            return Dense(view_of(self._tensors[stack])[number])
        weight = self._read(name)
        if len(weight.shape) != 2:
            raise NotUnderstoodError(f"its shape is {weight.shape}")
        return Turned(weight) if turned else weight

    def non_finite(self) -> dict[str, int]:
        """As :meth:`slipway.proof.stored_weights.StoredModel.non_finite`."""
        return count_non_finite({name: view_of(info) for name, info in self._tensors.items() if info.dtype in FLOATS})

    def _read(self, name: str) -> StoredWeight:
        dense = self._tensors.get(name)
        if dense is not None and dense.dtype in FLOATS:
            return Dense(view_of(dense))
        if dense is not None:
            return self._read_scaled(name, dense)
        return self._read_packed(name)

    def _read_scaled(self, name: str, info: TensorInfo) -> StoredWeight:
        scales = self._scales(name)
        zeros = f"{name}_zero_point" in self._tensors
        if info.dtype not in _SCALED or zeros or len(info.shape) != 2 or not _fits(scales, info.shape):
            raise NotUnderstoodError(f"it is stored as {info.dtype} in a form that is not known")
        values = view_of(info)
        if info.dtype != "I8":
            codes = torch.arange(_FLOAT8[info.dtype], dtype=torch.uint8)
            levels = _mirror(codes.view(torch_dtypes(info.dtype)[info.dtype]).float())
            return Coded(lambda rows: values[rows].float(), scales, None, (0, 0), tuple(info.shape), levels)
        return Coded(lambda rows: values[rows].int(), scales, None, (-128, 127), tuple(info.shape))

    def _read_float4(self, name: str, packed: TensorInfo) -> StoredWeight:
        """Read 4-bit floats, two in a byte, with scales that are powers of two or FP8."""
        scale, above = self._tensors.get(f"{name}_scale"), self._tensors.get(f"{name}_global_scale")
        known = scale is not None and len(packed.shape) == len(scale.shape) == 2 and packed.shape[0] == scale.shape[0]
        if scale is None or not known or 2 * packed.shape[1] % max(1, scale.shape[1]):
            raise NotUnderstoodError("it is packed as U8 in a form that is not known")
        if scale.dtype == "U8" and above is None:
            scales = torch.exp2(view_of(scale).float() - 127)
        elif scale.dtype == "F8_E4M3" and above is not None and above.dtype == "F32" and above.numel == 1:
            scales = view_of(scale).float() / view_of(above)
        else:
            raise NotUnderstoodError(f"its scales are {scale.dtype}, in a form that is not known")
        shape, stored = (packed.shape[0], 2 * packed.shape[1]), view_of(packed)
        return Coded(lambda rows: _unpack_float4(stored[rows]), scales, None, (0, 0), shape, _mirror(_FLOAT4))

    def _read_packed(self, name: str) -> StoredWeight:
        packed, shape = self._tensors[f"{name}_packed"], self._tensors.get(f"{name}_shape")
        if packed.dtype == "U8" and shape is None:
            return self._read_float4(name, packed)
        if packed.dtype != "I32" or len(packed.shape) != 2 or shape is None or f"{name}_g_idx" in self._tensors:
            raise NotUnderstoodError(f"it is packed as {packed.dtype} in a form that is not known")
        sizes = view_of(shape).flatten().tolist()
        if len(sizes) != 2:
            raise NotUnderstoodError(f"its shape is stored as {len(sizes)} numbers")
        rows, columns = (int(size) for size in sizes)
        bits = 32 * packed.shape[1] // max(1, columns)
        scales = self._scales(name)
        if bits not in _BITS or packed.shape != (rows, columns * bits // 32) or not _fits(scales, (rows, columns)):
            raise NotUnderstoodError(f"it is packed in a form that is not known: {packed.shape} for {(rows, columns)}")
        zeros = self._tensors.get(f"{name}_zero_point")
        middle = 1 << (bits - 1)
        return Coded(
            partial(_unpack, view_of(packed), bits=bits),
            scales,
            # Zero points are packed along the rows.
            None if zeros is None else _unpack(view_of(zeros).T.contiguous(), slice(None), bits=bits).T[:rows].float(),
            (-middle, middle - 1),
            (rows, columns),
        )

    def _scales(self, name: str) -> Tensor:
        info = self._tensors.get(f"{name}_scale")
        if info is None or info.dtype not in FLOATS:
            raise NotUnderstoodError("it has no scales of a known type")
        scales = view_of(info)
        return scales.reshape(len(scales), -1) if scales.dim() else scales.reshape(1, 1)


def _fits(scales: Tensor, shape: Sequence[int]) -> bool:
    """Return whether each row of a weight has whole groups of columns, and one scale for each; or all rows share one."""
    rows, groups = scales.shape
    return rows in (1, shape[0]) and groups > 0 and shape[1] % groups == 0


def _unpack(packed: Tensor, rows: slice, *, bits: int) -> Tensor:
    """Unpack codes from little-endian words that are offset by half of their range: int32 (R, K)."""
    bytes_ = packed[rows].contiguous().view(torch.uint8)
    if bits not in (4, 8):
        digits = torch.from_numpy(np.unpackbits(bytes_.numpy(), axis=1, bitorder="little"))
        digits = digits[:, : digits.shape[1] // bits * bits].reshape(len(bytes_), -1, bits).int()
        return (digits << torch.arange(bits)).sum(dim=2, dtype=torch.int32) - (1 << (bits - 1))
    if bits == 4:
        bytes_ = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).reshape(len(bytes_), -1)
    return bytes_.int() - (1 << (bits - 1))


def _mirror(levels: Tensor) -> Tensor:
    """Return values from 0 up, with their negatives before them."""
    return torch.cat([-levels[1:].flip(0), levels])


def _unpack_float4(packed: Tensor) -> Tensor:
    """Unpack 4-bit floats, float32 (R, K): the first of two in the low half of a byte, its sign above its magnitude."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(len(packed), -1)
    return _FLOAT4[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())


def view_of(info: TensorInfo) -> Tensor:
    """Return a stored tensor as a view of its mapped file.

    Raises:
        NotUnderstoodError: PyTorch has no such type.
    """
    if not DTYPES[info.dtype].torch:
        raise NotUnderstoodError(f"tensor {info.name!r} has the type {info.dtype}")
    dtype = torch_dtypes(info.dtype)[info.dtype]
    raw = torch.from_numpy(reading.mapped(info).reshape(-1).view(np.uint8))
    return raw.view(dtype).reshape(info.shape)
