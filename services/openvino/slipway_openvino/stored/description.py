"""Read the description of an IR, its ``.xml``: operations, their readers, and the places of constants. Nothing in it is trusted.

OpenVINO itself is not used: it builds the whole model of a description of any size, does not name a constant whose place is wrong, and a
fault in its native code would end the process that compares the weights of all outputs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

from slipway.proof.stored_weights import NotUnderstoodError
from slipway.texts import printable

LARGEST_BYTES = 1 << 28
"""Largest accepted description. Those of the largest models have a few tens of MB."""
MOST_LAYERS, MOST_EDGES = 1 << 20, 1 << 22
DEEPEST = 64
"""Most nested elements; bodies of loops have a few."""
LONGEST_NAME = 1 << 12
MOST_AXES = 8
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_LAYER = ["net", "layers", "layer"]
_DATA = [*_LAYER, "data"]
_EDGE = ["net", "edges", "edge"]
_LONGEST_SHOWN = 60


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
    if path.stat().st_size > LARGEST_BYTES:
        raise NotUnderstoodError(f"{path.name} has more than {LARGEST_BYTES} bytes")
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
    if text is None or not _NUMBER.fullmatch(text):
        raise NotUnderstoodError(f"{_quote(text or '')} is no number, size or offset")
    return int(text)


def _quote(text: str) -> str:
    return repr(printable(text[:_LONGEST_SHOWN]))
