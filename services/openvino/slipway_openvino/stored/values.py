"""Read constants of an IR from its mapped ``.bin``, copying some rows at a time.

Axes: N output features, K input features, R some of the N, G groups of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipway.proof.stored_weights import Dense, NotUnderstoodError, Rows
from slipway.texts import printable
from slipway_openvino.stored.description import Place

FLOATS: dict[str, tuple[Any, torch.dtype]] = {
    "f32": (np.float32, torch.float32),
    "f16": (np.float16, torch.float16),
    "bf16": (np.uint16, torch.bfloat16),  # numpy has no bfloat16: its bits
    "f64": (np.float64, torch.float64),
}
"""NumPy's and PyTorch's dtype for each type of floats."""
INTEGERS: dict[str, tuple[int, bool]] = {"i8": (8, True), "u8": (8, False), "i4": (4, True), "u4": (4, False)}
"""Bits of a type of integers, and whether it is signed."""
_NUMBERS: dict[str, Any] = {"i32": np.int32, "i64": np.int64}
_MOST_NUMBERS = 16
_PIECE_VALUES = 1 << 22


class Values:
    """The ``.bin`` of a model. Call :meth:`check` on a place before reading it.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._bytes = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)

    def check(self, name: str, place: Place) -> None:
        """Refuse a constant that is not within the file, or whose size does not match its shape.

        Raises:
            NotUnderstoodError: It does not fit.
        """
        if place.offset + place.size > len(self._bytes):
            raise NotUnderstoodError(
                f"constant {quote_name(name)} ends at byte {place.offset + place.size} of {self.name}, which has {len(self._bytes)}"
            )
        if place.kind in INTEGERS:
            bits = INTEGERS[place.kind][0]
        elif place.kind in FLOATS:
            bits = 8 * FLOATS[place.kind][1].itemsize
        elif place.kind in _NUMBERS:
            bits = 8 * np.dtype(_NUMBERS[place.kind]).itemsize
        else:  # constants of other types are not read
            return
        if place.size != (math.prod(place.shape) * bits + 7) // 8:
            raise NotUnderstoodError(
                f"constant {quote_name(name)} has {place.size} bytes for the shape {place.shape} of {place.kind}"
            )

    def floats(self, place: Place) -> np.ndarray:
        """Return a constant of floats, mapped, in NumPy's dtype. It may be unaligned, so copy before use."""
        return self._raw(place).view(FLOATS[place.kind][0]).reshape(place.shape)

    def packed(self, name: str, place: Place) -> np.ndarray:
        """Return the bytes of a constant of integers, uint8 (N, bytes of a row), mapped.

        Raises:
            NotUnderstoodError: A row does not end with a byte.
        """
        rows = place.shape[0]
        if math.prod(place.shape[1:]) * INTEGERS[place.kind][0] % 8:
            raise NotUnderstoodError(f"rows of constant {quote_name(name)} do not end with a byte")
        return self._raw(place).reshape(rows, place.size // max(1, rows))

    def whole(self, name: str, place: Place) -> Tensor | None:
        """Return a whole constant in its shape: floats in their type, integers as int32 (4-bit ones are stored without gaps); None for others."""
        if place.kind in FLOATS:
            return tensor_of(self.floats(place), place.kind)
        if place.kind not in INTEGERS:
            return None
        count = place.size * 8 // INTEGERS[place.kind][0]  # an odd number of 4-bit integers ends with half a byte
        codes = codes_of(self.packed(name, Place(place.kind, (1, count), place.offset, place.size)), place.kind)
        return codes.reshape(-1)[: math.prod(place.shape)].reshape(place.shape)

    def numbers(self, place: Place) -> list[int]:
        """Return the numbers of a small i32 or i64 constant; none for any other constant."""
        kind = _NUMBERS.get(place.kind)
        if kind is None or place.size > _MOST_NUMBERS * np.dtype(kind).itemsize:
            return []
        return [int(each) for each in np.array(self._raw(place)).view(kind)]

    def _raw(self, place: Place) -> np.ndarray:
        return self._bytes[place.offset : place.offset + place.size]


class FloatRows:
    """A matrix of floats, (N, K), as :class:`slipway.proof.stored_weights.StoredWeight`.

    Args:
        values: As :meth:`Values.floats` returns them, (N, K), or transposed to that.
        kind: Its type.
    """

    def __init__(self, values: np.ndarray, kind: str) -> None:
        self._values, self._kind = values, kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        return tuple(self._values.shape)

    def take(self, rows: slice) -> Rows:
        """Read some rows."""
        return Dense(tensor_of(self._values[rows], self._kind)).take(slice(None))


def tensor_of(values: np.ndarray, kind: str) -> Tensor:
    """Copy mapped floats to a tensor: PyTorch needs aligned elements."""
    return torch.from_numpy(np.array(values, order="C")).view(FLOATS[kind][1])


def codes_of(packed: np.ndarray, kind: str) -> Tensor:
    """Unpack rows of bytes (R, bytes of a row) to integers, int32 (R, K). Of two in a byte, the low half is the first."""
    bits, signed = INTEGERS[kind]
    bytes_ = torch.from_numpy(np.array(packed, order="C"))
    if bits == 4:
        bytes_ = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).reshape(len(bytes_), -1)
    codes, middle = bytes_.int(), 1 << (bits - 1)
    return (codes ^ middle) - middle if signed else codes


def limits_of(kind: str) -> tuple[int, int]:
    """Return the smallest and the largest integer of a type."""
    bits, signed = INTEGERS[kind]
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def pieces_of(values: np.ndarray, kind: str) -> Iterator[Tensor]:
    """Yield all values of mapped floats, some at a time."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, _PIECE_VALUES):
        yield tensor_of(flat[start : start + _PIECE_VALUES], kind)


def quote_name(name: str) -> str:
    """Quote a name from a file for a message."""
    return repr(printable(name[:200]))
