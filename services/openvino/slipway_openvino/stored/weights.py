"""Read the weights of an OpenVINO folder: the constants of products and lookups, either floats or integers with scales.

Constants have the names from the ONNX graph (``slipway.proof.constants``). ``save_model`` adds ``_compressed`` to the names of those
that it rounds to float16, and ``graphs/lookups.py`` adds ``.rows`` and a shape to the names of lookup tables.

Axes: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from slipway.files.paths import file_in
from slipway.model.configuration import ModelConfig
from slipway.proof.constants import NamedConstants
from slipway.proof.stored_weights import Coded, NotUnderstoodError, StoredWeight, count_non_finite
from slipway_openvino.params import DECODER_MODEL, ENCODER_MODEL, MODEL, PAIRS
from slipway_openvino.stored.decompression import decompression_of, require_readers
from slipway_openvino.stored.values import (
    FLOATS,
    INTEGERS,
    FloatRows,
    Place,
    Values,
    codes_of,
    limits_of,
    pieces_of,
    quote_name,
    read_description,
)

_ADDED = re.compile(r"(?:\.rows\.[0-9]+(?:x[0-9]+)*)?(?:_compressed)?$")


def stored(folder: Path, _model: Path, rows: Callable[[str], int]) -> StoredIr:
    """Open the weights of a folder.

    Args:
        folder: Folder of the output.
        _model: Folder of a model of the same architecture. It is not read, because the IR has the same names.
        rows: Function that returns the number of output features of a weight of that model by its name; 0 if it has none.

    Raises:
        NotUnderstoodError: A file of the IR is missing or is not a description of a model, or a constant is not within the ``.bin``.
        CheckpointValidationError: The folder has no ``config.json``.
    """
    files = (ENCODER_MODEL, DECODER_MODEL) if ModelConfig.read(folder).family in PAIRS else (MODEL,)
    return StoredIr([_Model(folder, file) for file in files], rows)


class StoredIr:
    """The weights of the models of a folder, as :class:`slipway.proof.stored_weights.StoredModel`.

    Args:
        models: The models. If two hold a weight, the first one's is read, as for graphs.
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
        """As :meth:`slipway.proof.stored_weights.StoredModel.weight`."""
        constant = self._named[name]
        model = self._models[constant.name]
        if model.place(constant.name).kind in INTEGERS:
            whole = model.integers(constant.name)  # always (N, K)
        else:
            whole = model.floats(constant.name, turned=turned != constant.turned)
        return self._named.part(name, whole)

    def non_finite(self) -> dict[str, int]:
        """As :meth:`slipway.proof.stored_weights.StoredModel.non_finite`, for weights, biases and scales; masks may hold infinity."""
        counts: dict[str, int] = {}
        holders = {self._named[name].name for name in self.names}
        for name, model in self._models.items():
            if name in holders or name.endswith(".bias"):
                for piece in model.all_floats(name):
                    for at, count in count_non_finite({name: piece}).items():
                        counts[at] = counts.get(at, 0) + count
        return counts


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
        """Return a matrix of floats as (N, K), transposed from (K, N) if ``turned``.

        Raises:
            NotUnderstoodError: It is not a matrix, or another operation than a product or lookup reads it.
        """
        place = self.place(name)
        if len(place.shape) != 2:
            raise NotUnderstoodError(f"the model has {quote_name(name)} as {place.shape}")
        require_readers(self._layers, self.constants[name])
        values = self._values.floats(place)
        return FloatRows(values.T if turned else values, place.kind)

    def integers(self, name: str) -> StoredWeight:
        """Return a matrix of integers, (N, K), in groups that share a scale.

        Raises:
            NotUnderstoodError: It is decompressed in an unknown way.
        """
        number, place = self.constants[name], self.place(name)
        if len(place.shape) < 2:
            raise NotUnderstoodError(f"the model has the integers {quote_name(name)} as {place.shape}")
        scales, zeros = decompression_of(self._layers, self._values, number).per_group(place)
        packed = self._values.packed(name, place)
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
        place = self.place(name)
        if place.kind in FLOATS:
            yield from pieces_of(self._values.floats(place), place.kind)
            return
        with suppress(NotUnderstoodError):  # the weight itself cannot be compared then
            yield decompression_of(self._layers, self._values, self.constants[name]).scales

    def _constant(self, number: int) -> Place:
        place = self._layers[number].place
        assert place is not None
        return place
