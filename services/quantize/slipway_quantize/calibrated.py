"""Take the integers of weights from a calibration, which has chosen them by their effect on text.

Axes: N output features, K input features, G groups of one row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipway.errors import ModelExportError, QuantizationError
from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.levels import WIDTHS
from slipway.model.safetensors_file import TensorInfo, read_safetensors
from slipway.texts import counted
from slipway_quantize.grid.rounding import GivenCodes, Rounded
from slipway_quantize.grid.search import Array
from slipway_quantize.levels import IntLevel

WEIGHTS, DESCRIPTION = "weights.safetensors", "calibration.json"
WITHOUT_DATA = "rtn"
"""Method of the weights that a calibration lacks."""
SCHEMA = 1
_TYPES = {"codes": ("I8", np.int8), "scales": ("F32", np.float32), "zero_points": ("I8", np.int8)}
_MOST_ERROR = 0.25
"""Largest error of a rounded weight, as a share of its energy: 3 bits add a thirtieth, the integers of another model twice the energy."""


@dataclass(frozen=True)
class CalibratedWeight:
    """The integers of one weight, or of several that a graph has joined row after row.

    Attributes:
        parts: Tensors of each weight by kind: ``codes`` (N, K), ``scales`` and ``zero_points`` (N, G).
        bits: Bits of a code.
        method: How they were chosen.
        sensitivity: Divergence that they add on held-out text if nothing else is rounded; None if it was not measured.
    """

    parts: tuple[Mapping[str, TensorInfo], ...]
    bits: int
    method: str
    sensitivity: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return sum(part["codes"].shape[0] for part in self.parts), self.parts[0]["codes"].shape[1]

    def round(self, weight: Array, row: int, *, scale_dtype: np.dtype[Any], name: str, column: int = 0) -> Rounded:
        """Return the integers of a piece of the weight, with the error that they add.

        Args:
            weight: The piece, of whole groups. (rows, columns)
            row: Its first row.
            column: Its first column.
            scale_dtype: Stored type of the scales.
            name: The weight's name, for errors.

        Raises:
            QuantizationError: ``CALIBRATION_MISMATCH``: they belong to another weight; ``NON_FINITE_WEIGHTS``; ``WEIGHT_OVERFLOW``.
        """
        parts = {kind: self._piece(kind, row, weight.shape, column=column) for kind in self.parts[0]}
        limit = 1 << (self.bits - 1)
        for kind in parts.keys() - {"scales"}:
            if parts[kind].size and not -limit <= parts[kind].min() <= parts[kind].max() < limit:
                raise mismatch_error(f"{kind} of {name!r} are not of {self.bits} bits", tensor=name)
        if not np.isfinite(parts["scales"]).all():
            raise mismatch_error(f"a scale of {name!r} is not finite", tensor=name)
        given = GivenCodes(parts["codes"], parts["scales"], parts.get("zero_points"))
        rounded = given.pack(weight, bits=self.bits, scale_dtype=scale_dtype, name=name)
        if rounded.error > _MOST_ERROR * rounded.energy:
            share = rounded.error / max(rounded.energy, 1e-30)
            raise mismatch_error(
                f"its integers of {name!r} are {share:.0%} off, so they are of another weight", tensor=name
            )
        return rounded

    def zero_points(self) -> Array | None:
        """Return all zero points, (N, G); None for a symmetric grid."""
        return self._rows("zero_points", 0, self.shape[0]) if "zero_points" in self.parts[0] else None

    def _piece(self, kind: str, row: int, shape: tuple[int, ...], *, column: int) -> Array:
        columns, width = self.shape[1], self.parts[0][kind].shape[1]
        first, last = column * width // columns, (column + shape[1]) * width // columns
        return self._rows(kind, row, shape[0])[:, first:last]

    def _rows(self, kind: str, start: int, count: int) -> Array:
        arrays = []
        for part in self.parts:
            rows = part[kind].shape[0]
            if start < rows and count > 0:
                taken = _map_tensor(part[kind], _TYPES[kind][1])[start : start + count]
                arrays.append(taken)
                count -= len(taken)
            start = max(start - rows, 0)
        return np.concatenate(arrays) if len(arrays) != 1 else arrays[0]


class Calibration:
    """The calibration of a model at a level.

    Args:
        folder: Folder that the stage ``calibrate`` has written.
        level: The level to make.

    Attributes:
        symmetric: Whether no weight has zero points.
        names: Names of the weights that it has, as transformers names them.

    Raises:
        QuantizationError: ``CALIBRATION_MISMATCH``: it is damaged, or of another model, number of bits or group size.
    """

    def __init__(self, folder: Path, level: IntLevel) -> None:
        description, stored = _read(folder)
        self._weights = _group_by_weight(stored, group_size=level.group_size)
        grid, wanted = (
            {"bits": description.get("bits"), "group_size": description.get("group_size")},
            {"bits": level.bits, "group_size": level.group_size},
        )
        if self._weights and grid != wanted:
            raise mismatch_error(
                f"it has {grid['bits']} bits in groups of {grid['group_size']}, and {level.bits} in groups of "
                f"{level.group_size} are asked for"
            )
        self._model = description.get("model")
        listed = description.get("weights")
        entries = listed if isinstance(listed, dict) else {}
        self._bits = {name: _bits(entries.get(name), name, level.bits) for name in self._weights}
        self._methods = {name: _method(entries.get(name)) for name in self._weights}
        self._divergences = {name: _divergence(entries.get(name)) for name in self._weights}
        self.symmetric = not any("zero_points" in parts for parts in self._weights.values())

    @property
    def names(self) -> frozenset[str]:
        """Names of the weights that it has, as transformers names them."""
        return frozenset(self._weights)

    def weight(self, names: Sequence[str], shape: tuple[int, int]) -> CalibratedWeight | None:
        """Return the integers of these weights, joined row after row; None if any is missing, or if they differ in bits or in zero points.

        Args:
            names: Names of the weights, as transformers names them.
            shape: (N, K) of all of them together.

        Raises:
            QuantizationError: ``CALIBRATION_MISMATCH``: they have another shape.
        """
        parts = tuple(self._weights[name] for name in names if name in self._weights)
        if len(parts) != len(names) or len({frozenset(part) for part in parts}) != 1:
            return None
        bits = {self._bits[name] for name in names}
        if len(bits) != 1:
            return None
        method = "+".join(dict.fromkeys(self._methods[name] for name in names))
        divergences = [self._divergences[name] for name in names]
        known = [each for each in divergences if each is not None]
        sensitivity = sum(known) if len(known) == len(divergences) else None
        weight = CalibratedWeight(parts, bits.pop(), method, sensitivity)
        columns = {part["codes"].shape[1] for part in parts}
        if weight.shape != shape or len(columns) != 1:
            raise mismatch_error(
                f"its {' and '.join(names)} have the shape {weight.shape}, the model's {shape}", tensor=names[0]
            )
        return weight

    def names_of_shape(self, shape: tuple[int, int], *, but: frozenset[str]) -> tuple[str, ...]:
        """Return the names of the weights that have this shape and are not in ``but``."""
        return tuple(name for name, parts in self._weights.items() if parts["codes"].shape == shape and name not in but)

    def require_model(self, digest: str) -> None:
        """Refuse the calibration of another model. A calibration that names no model is checked by its values alone.

        Args:
            digest: Digest of the model that is quantized, or of the one that it was made from; empty if unknown.

        Raises:
            QuantizationError: ``CALIBRATION_MISMATCH``.
        """
        if digest and isinstance(self._model, str) and self._model and self._model != digest:
            of, mine = self._model[:19], digest[:19]
            raise mismatch_error(f"it is of the model {of}…, and {mine}… is quantized", model=self._model)

    def require_used(self, used: int) -> None:
        """Refuse a calibration if the model has none of its weights.

        Raises:
            QuantizationError: ``CALIBRATION_MISMATCH``.
        """
        if self._weights and not used:
            first = min(self._weights)
            raise mismatch_error(
                f"the model has none of its {counted(len(self._weights), 'weight')}, first {first!r}", tensor=first
            )


def mismatch_error(what: str, **about: object) -> QuantizationError:
    """Return the error of a calibration that cannot be used."""
    return QuantizationError(
        f"the calibration does not fit: {what}",
        reason="CALIBRATION_MISMATCH",
        remedy="calibrate this model at this level again, or quantize it without a calibration",
        about=about,
    )


def _read(folder: Path) -> tuple[dict[str, Any], Mapping[str, TensorInfo]]:
    try:
        description = read_json_object(folder / DESCRIPTION, largest=LARGEST_LIST, lenient=True)
        stored = read_safetensors(folder / WEIGHTS).tensors
    except (OSError, ValueError) as error:
        raise mismatch_error(f"{DESCRIPTION} cannot be read ({error})", file=DESCRIPTION) from error
    except ModelExportError as error:
        raise mismatch_error(error.message, file=WEIGHTS) from error
    if description.get("schema_version") != SCHEMA:
        raise mismatch_error(
            f"{DESCRIPTION} has the schema version {description.get('schema_version')!r}", file=DESCRIPTION
        )
    return description, stored


def _group_by_weight(stored: Mapping[str, TensorInfo], *, group_size: int) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of each weight by kind; check types and shapes."""
    tensors: dict[str, dict[str, TensorInfo]] = {}
    for name, info in stored.items():
        weight, _, kind = name.rpartition(".")
        if kind not in _TYPES or info.dtype != _TYPES[kind][0] or len(info.shape) != 2:
            raise mismatch_error(
                f"{WEIGHTS} has {name!r} {info.dtype} {info.shape}, which is no part of a weight", tensor=name
            )
        tensors.setdefault(weight, {})[kind] = info
    for weight, parts in tensors.items():
        if not {"codes", "scales"} <= parts.keys():
            raise mismatch_error(f"{weight!r} has no codes or no scales", tensor=weight)
        rows, columns = parts["codes"].shape
        groups = {info.shape for kind, info in parts.items() if kind != "codes"}
        if groups != {(rows, columns // group_size)} or columns % group_size or not rows:
            raise mismatch_error(
                f"scales of {weight!r} are {sorted(groups)} for weights {parts['codes'].shape} in groups of {group_size}",
                tensor=weight,
            )
    return tensors


def _method(entry: Any) -> str:
    method = entry.get("method") if isinstance(entry, dict) else entry
    return method[:40] if isinstance(method, str) else "unknown"


def _bits(entry: Any, name: str, usual: int) -> int:
    """Return the bits of a weight's codes: its own, or else ``usual``."""
    bits = entry.get("bits", usual) if isinstance(entry, dict) else usual
    if isinstance(bits, bool) or bits not in WIDTHS:
        raise mismatch_error(f"{name!r} has codes of {bits!r} bits", tensor=name)
    return int(bits)


def _divergence(entry: Any) -> float | None:
    value = entry.get("divergence") if isinstance(entry, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def _map_tensor(info: TensorInfo, dtype: type[Any]) -> Array:
    raw = np.memmap(info.file, mode="r", dtype=np.uint8, offset=info.start, shape=(info.nbytes,))
    return np.frombuffer(raw, dtype).reshape(info.shape)
