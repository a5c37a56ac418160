"""Read what an IR stores: the operations of its ``.xml``, and constants of its mapped ``.bin``.

Some rows are copied at a time. Nothing in the ``.xml`` is trusted. OpenVINO itself is not used: it builds the whole model of a description
of any size, does not name a constant whose place is wrong, and a fault in its native code would end the process that compares the weights
of all outputs.

Axes: N output features, K input features, R some of the N, G groups of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

import numpy as np
import torch
from torch import Tensor

from slipway.proof.stored_weights import Dense, NotUnderstoodError, Rows
from slipway.texts import printable

LARGEST_DESCRIPTION_BYTES = 1 << 28
"""Largest accepted description. Those of the largest models have a few tens of MB."""
MOST_LAYERS, MOST_EDGES = 1 << 20, 1 << 22
DEEPEST = 64
"""Most nested elements; bodies of loops have a few."""
LONGEST_NAME = 1 << 12
MOST_AXES = 8
_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)
_LAYER = ["net", "layers", "layer"]
_DATA = [*_LAYER, "data"]
_EDGE = ["net", "edges", "edge"]
_LONGEST_SHOWN = 60

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


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a constant in the file of weights, as the description states it.

    Attributes:
        kind: Type of its elements, such as ``f32``.
        shape: Its sizes.
        offset: First byte.
        size: Bytes.
    """

    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(slots=True)
class Layer:
    """An operation.

    Attributes:
        name: Its name.
        kind: Its type, such as ``MatMul``.
        place: For a constant, the place of its values.
        inputs: Numbers of the operations that it reads, by port.
        readers: Numbers of the operations that read it.
    """

    name: str
    kind: str
    place: Place | None = None
    inputs: dict[int, int] = field(default_factory=dict)
    readers: list[int] = field(default_factory=list)


def read_description(path: Path) -> dict[int, Layer]:
    """Return the operations of a model by number, without those in the bodies of loops and branches.

    Raises:
        NotUnderstoodError: The file is not a description of a model, or too large.
        OSError: It cannot be read.
    """
    if path.stat().st_size > LARGEST_DESCRIPTION_BYTES:
        raise NotUnderstoodError(f"{path.name} has more than {LARGEST_DESCRIPTION_BYTES} bytes")
    reader = _Reader()
    try:
        with path.open("rb") as file:
            reader.parse(file)
        return reader.layers()
    except (expat.ExpatError, NotUnderstoodError) as error:
        raise NotUnderstoodError(f"{path.name} is no description of a model: {error}") from error


class _Reader:
    """Collects only layers and edges while it reads the file."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._layers: dict[int, Layer] = {}
        self._current: Layer | None = None
        self._edges: list[tuple[int, int, int]] = []
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.StartDoctypeDeclHandler = self._refuse_doctype

    def parse(self, file: Any) -> None:
        """Read a file, open in bytes."""
        self._parser.ParseFile(file)

    def layers(self) -> dict[int, Layer]:
        """Return the layers with their edges."""
        for source, target, port in self._edges:
            if source not in self._layers or target not in self._layers:
                raise NotUnderstoodError(f"an edge leads from {source} to {target}, and one of them is missing")
            if port in self._layers[target].inputs:
                raise NotUnderstoodError(f"two edges lead to port {port} of {_quote(self._layers[target].name)}")
            self._layers[target].inputs[port] = source
            self._layers[source].readers.append(target)
        return self._layers

    def _start(self, element: str, given: dict[str, str]) -> None:
        if len(self._open) >= DEEPEST:
            raise NotUnderstoodError(f"more than {DEEPEST} elements lie within each other")
        self._open.append(element)
        if self._open == _LAYER:
            self._begin_layer(given)
        elif self._open == _DATA and self._current is not None and self._current.kind == "Const":
            self._current.place = _place(self._current.name, given)
        elif self._open == _EDGE:
            if len(self._edges) >= MOST_EDGES:
                raise NotUnderstoodError(f"it has more than {MOST_EDGES} edges")
            source, target, port = (_number(given.get(key)) for key in ("from-layer", "to-layer", "to-port"))
            self._edges.append((source, target, port))

    def _begin_layer(self, given: dict[str, str]) -> None:
        number, name = _number(given.get("id")), given.get("name", "")
        if number in self._layers or len(self._layers) >= MOST_LAYERS:
            raise NotUnderstoodError(f"it has two layers of number {number}, or more than {MOST_LAYERS}")
        if len(name) > LONGEST_NAME:
            raise NotUnderstoodError(f"the name of layer {number} has {len(name)} characters")
        self._current = self._layers[number] = Layer(name, given.get("type", ""))

    def _end(self, _: str) -> None:
        self._open.pop()

    def _refuse_doctype(self, *_: object) -> None:
        raise NotUnderstoodError("it has a document type, which may define entities")


def _place(name: str, given: dict[str, str]) -> Place:
    sizes = [size.strip() for size in given.get("shape", "").split(",", MOST_AXES)]
    if len(sizes) > MOST_AXES:
        raise NotUnderstoodError(f"{_quote(name)} has more than {MOST_AXES} axes")
    shape = () if sizes == [""] else tuple(_number(size) for size in sizes)
    return Place(given.get("element_type", ""), shape, _number(given.get("offset")), _number(given.get("size")))


def _number(text: str | None) -> int:
    if text is None or not _DIGITS.fullmatch(text):
        raise NotUnderstoodError(f"{_quote(text or '')} is no number, size or offset")
    return int(text)


def _quote(text: str) -> str:
    return repr(printable(text[:_LONGEST_SHOWN]))


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
