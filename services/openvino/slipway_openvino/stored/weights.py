"""Read the weights of an OpenVINO folder: constants of products and lookups, dense, or integers with the scales that decompress them.

Constants have the names that the ONNX graph gave them (``slipway_validate.runner.survival.constants``). ``save_model`` adds ``_compressed`` to
those that it rounds to float16, and ``graphs/lookups.py`` adds ``.rows`` and a shape to those whose rows are looked up.

Axes: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slipway.files.links import file_in
from slipway.models.base_format import read_config
from slipway.models.families import family_of
from slipway_openvino.families import PAIRS
from slipway_openvino.files import DECODER_MODEL, ENCODER_MODEL, MODEL
from slipway_openvino.stored.description import Layer, Place, read_description
from slipway_openvino.stored.values import (
    FLOATS,
    INTEGERS,
    FloatRows,
    Values,
    codes_of,
    limits_of,
    pieces_of,
    shown,
    tensor_of,
)
from slipway_validate.runner.survival.constants import NamedConstants
from slipway_validate.runner.survival.stored import Coded, NotUnderstoodError, StoredWeight, count_non_finite

_ADDED = re.compile(r"(?:\.rows\.[0-9]+(?:x[0-9]+)*)?(?:_compressed)?$")
_PASSED_ON = frozenset({"Convert", "Reshape", "Transpose", "Squeeze", "Unsqueeze"})
"""Operations between a weight and what reads it, after which the values are the same."""
_READERS = frozenset({"MatMul", "Gather", "GatherND"})
_MOST_STEPS = 64
"""Operations between a weight and what reads it, in all places together."""
_BLOCKED = 3
"""Most axes of integers: (N, G, values of a group)."""


def stored(folder: Path, _model: Path, rows: Callable[[str], int]) -> StoredIr:
    """Open the weights of a folder.

    Args:
        folder: Folder of the output.
        _model: Folder of a model of its architecture, which is not read: the IR has its names.
        rows: Function that returns the number of output features of a weight of that model by its name; 0 if it has none.

    Raises:
        NotUnderstoodError: A file of the IR is missing, is no description of a model, or names a constant that does not lie in its ``.bin``.
        CheckpointValidationError: The folder has no ``config.json``.
    """
    files = (ENCODER_MODEL, DECODER_MODEL) if family_of(read_config(folder)) in PAIRS else (MODEL,)
    return StoredIr([_Model(folder, file) for file in files], rows)


class StoredIr:
    """The weights of the models of a folder, as :class:`slipway_validate.runner.survival.stored.StoredModel`.

    Args:
        models: The models; of two that hold a weight, the first one's is read, as it is of graphs.
        rows: As :func:`stored`.
    """

    def __init__(self, models: list[_Model], rows: Callable[[str], int]) -> None:
        self._models: dict[str, _Model] = {}
        for model in models:
            for name in model.constants:
                self._models.setdefault(name, model)
        self._named = NamedConstants(self._models, rows)
        self.names = self._named.names

    def weight(self, name: str, *, turned: bool) -> StoredWeight:
        """As :meth:`slipway_validate.runner.survival.stored.StoredModel.weight`."""
        constant = self._named[name]
        model = self._models[constant.name]
        if model.place(constant.name).kind in INTEGERS:
            whole = model.integers(constant.name)  # always (N, K)
        else:
            whole = model.floats(constant.name, turned=turned != constant.turned)
        return self._named.part(name, whole)

    def non_finite(self) -> dict[str, int]:
        """As :meth:`slipway_validate.runner.survival.stored.StoredModel.non_finite`: of weights, biases and scales; masks hold infinity rightly."""
        found: dict[str, int] = {}
        holders = {self._named[name].name for name in self.names}
        for name, model in self._models.items():
            if name in holders or name.endswith(".bias"):
                for piece in model.all_floats(name):
                    for at, count in count_non_finite({name: piece}).items():
                        found[at] = found.get(at, 0) + count
        return found


@dataclass(frozen=True, slots=True)
class _Scales:
    """What makes weights of integers.

    Attributes:
        scale: Number of the constant with scales.
        zero: Number of the one with zero points; None for none.
    """

    scale: int
    zero: int | None


class _Model:
    """One model of a folder, and its constants by the names that the graph gave them."""

    def __init__(self, folder: Path, file: str) -> None:
        paths = [file_in(folder, name) for name in (file, Path(file).with_suffix(".bin").name)]
        description, values = paths
        if description is None or values is None:
            raise NotUnderstoodError(f"the folder has no {file}, or not the .bin beside it")
        self._layers = read_description(description)
        self._values = Values(values)
        self.constants: dict[str, int] = {}
        for number, layer in self._layers.items():
            place = layer.place
            if place is None:
                continue
            self._values.check(layer.name, place)
            if place.kind in FLOATS or place.kind in INTEGERS:
                self.constants.setdefault(_ADDED.sub("", layer.name), number)

    def place(self, name: str) -> Place:
        """Return where a constant lies."""
        return self._constant(self.constants[name])

    def floats(self, name: str, *, turned: bool) -> StoredWeight:
        """Return a matrix of floats as (N, K), turned from (K, N) if so asked.

        Raises:
            NotUnderstoodError: It is no matrix, or something else than products and lookups reads it.
        """
        place = self.place(name)
        if len(place.shape) != 2:
            raise NotUnderstoodError(f"the model has {shown(name)} as {place.shape}")
        self._require_readers(self.constants[name])
        values = self._values.floats(place)
        return FloatRows(values.T if turned else values, place.kind)

    def integers(self, name: str) -> StoredWeight:
        """Return a matrix of integers, (N, K), in groups that share a scale.

        Raises:
            NotUnderstoodError: They are decompressed in an unknown way.
        """
        number, place = self.constants[name], self.place(name)
        if not 2 <= len(place.shape) <= _BLOCKED:
            raise NotUnderstoodError(f"the model has the integers {shown(name)} as {place.shape}")
        by = self._decompression(number)
        packed = self._values.packed(name, place)
        scales = self._per_group(by.scale, place)
        zeros = None if by.zero is None else self._per_group(by.zero, place)
        columns = place.size * 8 // INTEGERS[place.kind][0] // max(1, place.shape[0])
        return Coded(
            lambda rows: codes_of(packed[rows], place.kind),
            scales,
            zeros,
            limits_of(place.kind),
            (place.shape[0], columns),
        )

    def all_floats(self, name: str) -> Iterator[Tensor]:
        """Yield the floats of a constant, or the scales of its integers, some at a time."""
        number = self.constants[name]
        if self.place(name).kind in INTEGERS:
            try:
                number = self._decompression(number).scale
            except NotUnderstoodError:  # then the weight itself is not compared
                return
        place = self._constant(number)
        if place.kind in FLOATS:
            yield from pieces_of(self._values.floats(place), place.kind)

    def _constant(self, number: int) -> Place:
        place = self._layers[number].place
        assert place is not None
        return place

    def _require_readers(self, number: int) -> None:
        """Require that only products and lookups read a value: arithmetic on it would make other weights than those that are stored."""
        for reader in self._readers(number):
            if reader.kind not in _READERS:
                raise NotUnderstoodError(f"its weight is read by {shown(reader.kind)}")

    def _readers(self, number: int) -> Iterator[Layer]:
        """Yield what reads a value, also after it got another type or shape.

        Raises:
            NotUnderstoodError: There are more steps on the way than a writer makes.
        """
        waiting, seen = [number], {number}
        while waiting:
            for reader in self._layers[waiting.pop()].readers:
                layer = self._layers[reader]
                if layer.kind not in _PASSED_ON:
                    yield layer
                elif reader not in seen:
                    _require_few(seen)
                    seen.add(reader)
                    waiting.append(reader)

    def _decompression(self, number: int) -> _Scales:
        """Return the scales and zero points of integers: ``(integers - zero point) x scale``, in every place that reads them.

        Raises:
            NotUnderstoodError: They are read in another way, or with several scales.
        """
        found: dict[tuple[Place, Place | None], _Scales] = {}
        waiting: list[tuple[int, int | None]] = [(number, None)]
        seen = set(waiting)
        while waiting:
            at, zero = waiting.pop()
            for reader in dict.fromkeys(self._layers[at].readers):
                layer, other = self._layers[reader], self._other_constant(reader, at)
                _require_few(seen)
                if layer.kind == "Convert":
                    further = (reader, zero)
                elif layer.kind == "Subtract" and zero is None and layer.inputs.get(0) == at and other is not None:
                    further = (reader, other)
                elif layer.kind == "Multiply" and other is not None:
                    self._require_readers(reader)
                    places = self._constant(other), None if zero is None else self._constant(zero)
                    found.setdefault(places, _Scales(other, zero))
                    continue
                else:
                    raise NotUnderstoodError(f"its integers are read by {shown(layer.kind)}")
                if further not in seen:
                    seen.add(further)
                    waiting.append(further)
        if len(found) != 1:
            raise NotUnderstoodError(f"its integers have {len(found)} kinds of scales")
        return next(iter(found.values()))

    def _other_constant(self, number: int, first: int) -> int | None:
        """Return the constant that an operation of two inputs reads beside ``first``, maybe of another type; None if there is none."""
        others = [source for _, source in sorted(self._layers[number].inputs.items()) if source != first]
        if len(others) != 1:
            return None
        layer = self._layers[other := others[0]]
        if layer.kind == "Convert" and 0 in layer.inputs:
            layer = self._layers[other := layer.inputs[0]]
        return other if layer.place is not None else None

    def _per_group(self, number: int, codes: Place) -> Tensor:
        """Return scales or zero points as (N, G), with one for 1.

        Raises:
            NotUnderstoodError: They are not one for whole groups of a row.
        """
        layer, place = self._layers[number], self._constant(number)
        if place.kind in FLOATS:
            values = tensor_of(self._values.floats(place), place.kind)
        elif place.kind in INTEGERS:
            values = self._zero_points(layer.name, place)
        else:
            raise NotUnderstoodError(f"constant {shown(layer.name)} has the type {shown(place.kind)}")
        if values.numel() == 1:
            return values.reshape(1, 1)
        fits = len(place.shape) == len(codes.shape) and place.shape[-1] == 1
        if not fits or any(size not in (1, whole) for size, whole in zip(place.shape, codes.shape, strict=True)):
            raise NotUnderstoodError(f"scales or zero points of {place.shape} are not those of groups of {codes.shape}")
        return values.reshape(place.shape[0], -1)

    def _zero_points(self, name: str, place: Place) -> Tensor:
        """Return zero points, float32, in their shape; two of 4 bits in a byte, without gaps between rows."""
        values = place.size * 8 // INTEGERS[place.kind][0]  # an odd number of 4 bits ends with half a byte
        flat = Place(place.kind, (1, values), place.offset, place.size)
        codes = codes_of(self._values.packed(name, flat), place.kind)
        return codes.reshape(-1)[: math.prod(place.shape)].float().reshape(place.shape)


def _require_few(seen: set[Any]) -> None:
    if len(seen) > _MOST_STEPS:
        raise NotUnderstoodError(f"more than {_MOST_STEPS} operations lie between it and what reads it")
