"""Find scales and zero points of integers, ``(integers - zero point) x scale``, as NNCF and ONNX graphs write them, and their readers.

Axes: N output features, G groups of a row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipway.proof.stored_weights import NotUnderstoodError
from slipway_openvino.stored.values import Layer, Place, Values, quote_name

_DEEPEST = 3
"""Operations between scales or zero points and their constant."""
_MOST_INPUTS = 5

_PASSED_ON = frozenset({"Convert", "Reshape", "Transpose", "Squeeze", "Unsqueeze"})
"""Operations between a weight and its reader that do not change values."""
_READERS = frozenset({"MatMul", "Gather", "GatherND"})
_MOST_STEPS = 64
"""Most operations between a weight and all its readers."""


@dataclass(frozen=True, slots=True)
class Decompression:
    """Scales and zero points, in the shapes in which the model uses them.

    Attributes:
        scales: In their stored type.
        zeros: float32; None if there are no zero points.
    """

    scales: Tensor
    zeros: Tensor | None

    def per_group(self, codes: Place) -> tuple[Tensor, Tensor | None]:
        """Return both as (N, G); a single number as (1, 1).

        Raises:
            NotUnderstoodError: They do not belong to whole groups of a row.
        """
        return _per_group(self.scales, codes), None if self.zeros is None else _per_group(self.zeros, codes)

    def equals(self, other: Decompression) -> bool:
        """Return whether another one computes the same weights."""
        if (self.zeros is None) != (other.zeros is None) or not _are_equal(self.scales, other.scales):
            return False
        return self.zeros is None or other.zeros is None or _are_equal(self.zeros, other.zeros)


def decompression_of(layers: Mapping[int, Layer], values: Values, number: int) -> Decompression:
    """Return the scales and zero points of a constant's integers, which must be the same for all readers.

    Args:
        layers: The operations of the model.
        values: Its constants.
        number: The constant.

    Raises:
        NotUnderstoodError: They are read in another way, or with several scales.
    """
    decompressions: list[Decompression] = []
    waiting: list[tuple[int, int | None]] = [(number, None)]
    seen = set(waiting)
    while waiting:
        at, zero = waiting.pop()
        for reader in dict.fromkeys(layers[at].readers):
            layer, other = layers[reader], _other_input(layers[reader], at)
            require_few(seen)
            if layer.kind == "Convert":
                further = (reader, zero)
            elif layer.kind == "Subtract" and zero is None and layer.inputs.get(0) == at and other is not None:
                further = (reader, other)
            elif layer.kind == "Multiply" and other is not None:
                require_readers(layers, reader)
                decompressions.append(_read(layers, values, scale=other, zero=zero))
                continue
            else:
                raise NotUnderstoodError(f"its integers are read by {quote_name(layer.kind)}")
            if further not in seen:
                seen.add(further)
                waiting.append(further)
    if not decompressions or not all(each.equals(decompressions[0]) for each in decompressions[1:]):
        raise NotUnderstoodError("its integers have several scales, or none")
    return decompressions[0]


def _other_input(layer: Layer, first: int) -> int | None:
    others = [source for _, source in sorted(layer.inputs.items()) if source != first]
    return others[0] if len(others) == 1 else None


def _read(layers: Mapping[int, Layer], values: Values, *, scale: int, zero: int | None) -> Decompression:
    scales = _constant(layers, values, scale)
    zeros = None if zero is None else _constant(layers, values, zero)
    if scales is None or not scales.is_floating_point() or (zero is not None and zeros is None):
        raise NotUnderstoodError("the scales or zero points of its integers are no constants")
    return Decompression(scales, None if zeros is None else zeros.float())


def _constant(layers: Mapping[int, Layer], values: Values, number: int, *, steps: int = _DEEPEST) -> Tensor | None:
    """Return a value as a constant, through conversions, reshapes and slices; None if it is computed in another way."""
    layer = layers[number]
    if layer.place is not None:
        return values.whole(layer.name, layer.place)
    inputs = [layer.inputs[port] for port in sorted(layer.inputs)]
    if not steps or not 0 < len(inputs) <= _MOST_INPUTS:
        return None
    if layer.kind == "Convert":
        return _constant(layers, values, inputs[0], steps=steps - 1)
    if layer.kind not in ("Reshape", "Slice"):
        return None
    given = _constant(layers, values, inputs[0], steps=steps - 1)
    by = [_numbers(layers, values, each) for each in inputs[1:]]
    if given is None:
        return None
    return _reshape(given, by) if layer.kind == "Reshape" else _cut(given, by)


def _numbers(layers: Mapping[int, Layer], values: Values, number: int) -> list[int]:
    """Return the numbers of a constant; none if it is not a constant of numbers."""
    place = layers[number].place
    return [] if place is None else values.numbers(place)


def _reshape(given: Tensor, by: list[list[int]]) -> Tensor | None:
    sizes = by[0] if len(by) == 1 else []
    fits = bool(sizes) and min(sizes) > 0 and math.prod(sizes) == given.numel()
    return given.reshape(sizes) if fits else None


def _cut(given: Tensor, by: list[list[int]]) -> Tensor | None:
    """Return the beginning of an axis: an odd number of 4-bit zero points is stored with one more, to fill a byte."""
    if len(by) != 4 or any(len(each) != 1 for each in by):
        return None
    (start,), (stop,), (step,), (axis,) = by
    if start != 0 or step != 1 or not 0 <= axis < given.dim() or not 0 < stop <= given.shape[axis]:
        return None
    return given.narrow(axis, 0, stop)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _per_group(given: Tensor, codes: Place) -> Tensor:
    if given.numel() == 1:
        return given.reshape(1, 1)
    if not _are_of_groups(tuple(given.shape), codes.shape):
        raise NotUnderstoodError(
            f"scales or zero points of {tuple(given.shape)} are not those of groups of {codes.shape}"
        )
    return given.reshape(given.shape[0], -1)


def _are_of_groups(scales: tuple[int, ...], codes: tuple[int, ...]) -> bool:
    """Return whether scales belong to whole, consecutive groups of a row: shaped as the codes (N, …), and 1 from some axis on."""
    if len(scales) != len(codes) or any(size not in (1, whole) for size, whole in zip(scales, codes, strict=True)):
        return False
    within = [size for size, whole in zip(scales[1:], codes[1:], strict=True) if whole > 1]
    return within[-1:] in ([], [1]) and sorted(within, key=lambda size: size == 1) == within


def require_readers(layers: Mapping[int, Layer], number: int) -> None:
    """Require that only products and lookups read a value: arithmetic on it would change the stored weights.

    Raises:
        NotUnderstoodError: Another operation reads it.
    """
    for reader in _readers(layers, number):
        if reader.kind not in _READERS:
            raise NotUnderstoodError(f"its weight is read by {quote_name(reader.kind)}")


def require_few(seen: Collection[object]) -> None:
    """Refuse a weight with more operations before its readers than any writer makes.

    Raises:
        NotUnderstoodError: There are more.
    """
    if len(seen) > _MOST_STEPS:
        raise NotUnderstoodError(f"more than {_MOST_STEPS} operations lie between it and what reads it")


def _readers(layers: Mapping[int, Layer], number: int) -> Iterator[Layer]:
    """Yield the operations that read a value, also through changes of its type or shape."""
    waiting, seen = [number], {number}
    while waiting:
        for reader in layers[waiting.pop()].readers:
            if layers[reader].kind not in _PASSED_ON:
                yield layers[reader]
            elif reader not in seen:
                require_few(seen)
                seen.add(reader)
                waiting.append(reader)
