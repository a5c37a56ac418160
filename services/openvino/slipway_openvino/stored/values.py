"""Constants of an IR, mapped from its ``.bin``: some rows at a time, in memory of their own.

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
"""How numpy holds a type of floats, and what it is to PyTorch."""
INTEGERS: dict[str, tuple[int, bool]] = {"i8": (8, True), "u8": (8, False), "i4": (4, True), "u4": (4, False)}
"""Bits of a type of integers, and whether it is signed."""
_NUMBERS: dict[str, Any] = {"i32": np.int32, "i64": np.int64}
_MOST_NUMBERS = 16
_PIECE_VALUES = 1 << 22


class Values:
    """The ``.bin`` of a model. What is read of it was checked before.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._bytes = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)

    def check(self, name: str, place: Place) -> None:
        """Refuse a constant that does not lie in the file, or whose size is not that of its shape.

        Raises:
            NotUnderstoodError: It does not fit.
        """
        if place.offset + place.size > len(self._bytes):
            raise NotUnderstoodError(
                f"constant {shown(name)} ends at byte {place.offset + place.size} of {self.name}, which has {len(self._bytes)}"
            )
        if place.kind in INTEGERS:
            bits = INTEGERS[place.kind][0]
        elif place.kind in FLOATS:
            bits = 8 * FLOATS[place.kind][1].itemsize
        elif place.kind in _NUMBERS:
            bits = 8 * np.dtype(_NUMBERS[place.kind]).itemsize
        else:  # of another type, which is not read
            return
        if place.size != (math.prod(place.shape) * bits + 7) // 8:
            raise NotUnderstoodError(
                f"constant {shown(name)} has {place.size} bytes for the shape {place.shape} of {place.kind}"
            )

    def floats(self, place: Place) -> np.ndarray:
        """Return a constant of floats, mapped, as numpy holds its type; it may lie at any byte, so copy before use."""
        return self._raw(place).view(FLOATS[place.kind][0]).reshape(place.shape)

    def packed(self, name: str, place: Place) -> np.ndarray:
        """Return the bytes of a constant of integers, uint8 (N, bytes of a row), mapped.

        Raises:
            NotUnderstoodError: A row does not end with a byte.
        """
        rows = place.shape[0]
        if math.prod(place.shape[1:]) * INTEGERS[place.kind][0] % 8:
            raise NotUnderstoodError(f"rows of constant {shown(name)} do not end with a byte")
        return self._raw(place).reshape(rows, place.size // max(1, rows))

    def whole(self, name: str, place: Place) -> Tensor | None:
        """Return all of a constant in its shape: floats in their type, integers as int32, two of 4 bits in a byte without gaps; None for others."""
        if place.kind in FLOATS:
            return tensor_of(self.floats(place), place.kind)
        if place.kind not in INTEGERS:
            return None
        count = place.size * 8 // INTEGERS[place.kind][0]  # an odd number of 4 bits ends with half a byte
        codes = codes_of(self.packed(name, Place(place.kind, (1, count), place.offset, place.size)), place.kind)
        return codes.reshape(-1)[: math.prod(place.shape)].reshape(place.shape)

    def numbers(self, place: Place) -> list[int]:
        """Return the few numbers of a constant of sizes or places; none if it is none."""
        kind = _NUMBERS.get(place.kind)
        if kind is None or place.size > _MOST_NUMBERS * np.dtype(kind).itemsize:
            return []
        return [int(each) for each in np.array(self._raw(place)).view(kind)]

    def _raw(self, place: Place) -> np.ndarray:
        return self._bytes[place.offset : place.offset + place.size]


class FloatRows:
    """A matrix of floats, (N, K), as :class:`slipway.proof.stored_weights.StoredWeight`.

    Args:
        values: As :meth:`Values.floats` returns it, (N, K) or turned to it.
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
    """Copy mapped floats to where PyTorch may read them: it wants whole elements at addresses of their size."""
    return torch.from_numpy(np.array(values, order="C")).view(FLOATS[kind][1])


def codes_of(packed: np.ndarray, kind: str) -> Tensor:
    """Return the integers of some rows of bytes (R, bytes of a row), int32 (R, K); of two in a byte, the first is in its low half."""
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


def shown(name: str) -> str:
    """Return a name of a file for a message."""
    return repr(printable(name[:200]))
