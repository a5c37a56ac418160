"""Read the weights that a GGUF file stores, with the model's names and order of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from slipway.proof.stored_weights import Dense, NotUnderstoodError, Rows, StoredWeight, Turned, count_non_finite
from slipway_gguf.architectures.entry import Change, keep, transpose
from slipway_gguf.files import text_files
from slipway_gguf.weights.planned import Array, Planned
from slipway_gguf.weights.tensors import plan_file

_MATRIX = 2
_EXACT = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


def stored(folder: Path, model: Path, _rows: Callable[[str], int]) -> StoredFile:
    """Open the file in a folder.

    Args:
        folder: Folder of the output.
        model: Folder of a model of the same architecture, whose names and order of rows are used.
        _rows: Returns the number of output features of a weight; not needed, because no tensor of a file joins layers.

    Raises:
        NotUnderstoodError: The folder has no file, or several.
        GGUFExportError: The model has no place in a GGUF file.
    """
    files = text_files(folder)
    if len(files) != 1:
        raise NotUnderstoodError(f"the folder has {len(files)} GGUF files")
    return StoredFile(files[0], plan_file(model).tensors)


class StoredFile:
    """The weights of a file, as :class:`slipway.proof.stored_weights.StoredModel`.

    Args:
        file: The file.
        planned: The tensors that a file of the model has.
    """

    def __init__(self, file: Path, planned: list[Planned]) -> None:
        self._tensors = {each.name: each for each in gguf.GGUFReader(file).tensors}
        # Tensors that the file joins into one, such as experts, cannot be read alone here.
        self._planned = {
            each.parts[0].tensor.name: each
            for each in planned
            if len(each.parts) == 1 and len(each.shape) == _MATRIX and each.name in self._tensors and _is_whole(each)
        }
        places = Counter(name for each in planned for name in {part.tensor.name for part in each.parts})
        self._made = {
            each.parts[0].tensor.name: each
            for each in planned
            if each.name in self._tensors and _is_rebuilt(each) and places[each.parts[0].tensor.name] == 1
        }
        self.names = frozenset({*self._planned, *self._made})

    def weight(self, name: str, *, turned: bool) -> StoredWeight:
        """As :meth:`slipway.proof.stored_weights.StoredModel.weight`."""
        if name not in self._planned:
            return _rebuild(self._made[name], self._tensors[self._made[name].name])
        planned = self._planned[name]
        tensor = self._tensors[planned.name]
        if tuple(int(size) for size in reversed(tensor.shape)) != planned.shape:
            raise NotUnderstoodError(f"{planned.name} has the shape {tuple(tensor.shape)}")
        whole = _Quantized(tensor, planned, _places(planned))
        is_turned = planned.parts[0].piece.form is transpose  # the file holds it (N, K), the model (K, N)
        return whole if turned == is_turned else Turned(whole)

    def non_finite(self) -> dict[str, int]:
        """As :meth:`slipway.proof.stored_weights.StoredModel.non_finite`."""
        floats = {
            name: torch.from_numpy(np.array(each.data)).view(_EXACT[each.tensor_type])
            for name, each in self._tensors.items()
            if each.tensor_type in _EXACT
        }
        return count_non_finite(floats)


class _Quantized:
    """A matrix of a file, (N, K), whose rows may lie in another order."""

    def __init__(self, tensor: gguf.ReaderTensor, planned: Planned, places: Tensor | None) -> None:
        self._tensor, self._planned, self._places = tensor, planned, places
        self._data = tensor.data.reshape(planned.shape[0], -1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        return self._planned.shape

    def take(self, rows: slice) -> Rows:
        """Read some rows."""
        at = rows if self._places is None else self._places[rows].numpy()
        data, dtype = self._data[at], _EXACT.get(self._tensor.tensor_type)
        values = self._values(data)
        dense = Dense(values if dtype is None else values.to(dtype)).take(slice(None))
        codes = _CODES.get(self._tensor.tensor_type)
        return dense if codes is None else replace(dense, grid=lambda: self._grid(data, values, codes))

    def _values(self, data: Array) -> Tensor:
        raw = gguf.quants.dequantize(data, self._tensor.tensor_type)
        values = torch.from_numpy(np.ascontiguousarray(raw, dtype=np.float32)).reshape(-1, self.shape[1])
        return (values - self._planned.offset) / self._planned.parts[0].piece.factor

    def _grid(self, data: Array, values: Tensor, codes: _Codes) -> Rows:
        """Find the grid of rows: dequantize the codes 0 and 1 with the rows' scales."""
        blocks = data.reshape(len(data), -1, codes.block)
        low, next_one = (self._values(codes.all_of(blocks, one=one).reshape(data.shape)) for one in (False, True))
        first, second = (0.0, 1.0) if codes.levels is None else codes.levels[:2].tolist()
        scales = (next_one - low) / (second - first)
        zeros = torch.where(scales != 0, first - low / scales, torch.zeros(()))
        grid = Rows(values=values, stored=values, scales=scales, zeros=zeros, limits=codes.limits, levels=codes.levels)
        return replace(grid, stored=grid.codes_of(values, scales))


@dataclass(frozen=True, slots=True)
class _Codes:
    """Positions of the codes in a block of a type. Source: ``ggml-common.h``.

    Attributes:
        block: Bytes of a block.
        low: Bytes with the codes' low bits.
        high: Bytes with their high bits.
        one: Value of a byte of low bits in which each code is 1.
        limits: Smallest and largest code.
        levels: Values that the codes stand for, by code; None if these are the codes themselves. float32 (M,)
    """

    block: int
    low: slice
    high: slice
    one: int
    limits: tuple[int, int] = (0, 0)
    levels: Tensor | None = None

    def all_of(self, blocks: Array, *, one: bool) -> Array:
        """Return blocks with the same scales and the code 0 or 1 everywhere."""
        result = np.array(blocks)
        result[..., self.high] = 0
        result[..., self.low] = self.one if one else 0
        return result


_NONE = slice(0, 0)
_IQ4 = torch.tensor(gguf.quants.IQ4_NL.kvalues, dtype=torch.float32)
_CODES = {
    gguf.GGMLQuantizationType.Q4_K: _Codes(144, slice(16, 144), _NONE, 0x11, (0, 15)),
    gguf.GGMLQuantizationType.Q5_K: _Codes(176, slice(48, 176), slice(16, 48), 0x11, (0, 31)),
    gguf.GGMLQuantizationType.Q6_K: _Codes(210, slice(0, 128), slice(128, 192), 0x11, (0, 63)),
    gguf.GGMLQuantizationType.Q8_0: _Codes(34, slice(2, 34), _NONE, 0x01, (-127, 127)),
    gguf.GGMLQuantizationType.Q5_1: _Codes(24, slice(8, 24), slice(4, 8), 0x11, (0, 31)),
    gguf.GGMLQuantizationType.Q5_0: _Codes(22, slice(6, 22), slice(2, 6), 0x11, (0, 31)),
    gguf.GGMLQuantizationType.Q4_1: _Codes(20, slice(4, 20), _NONE, 0x11, (0, 15)),
    gguf.GGMLQuantizationType.Q4_0: _Codes(18, slice(2, 18), _NONE, 0x11, (0, 15)),
    gguf.GGMLQuantizationType.IQ4_XS: _Codes(136, slice(8, 136), _NONE, 0x11, levels=_IQ4),
    gguf.GGMLQuantizationType.IQ4_NL: _Codes(18, slice(2, 18), _NONE, 0x11, levels=_IQ4),
}
"""All quantized types of files that Slipway writes; no other grid is known."""


def _is_whole(planned: Planned) -> bool:
    """Return whether a tensor of the file is one whole tensor of the model."""
    part, piece = planned.parts[0], planned.parts[0].piece
    plain = piece.columns is keep and planned.change is Change.NONE
    return plain and part.tensor.shape == (planned.shape[::-1] if piece.form is transpose else planned.shape)


def _is_rebuilt(planned: Planned) -> bool:
    """Return whether a tensor of the file has some rows of one tensor of the model, or some twice."""
    if len(planned.shape) != _MATRIX or not planned.parts or planned.change is not Change.NONE or planned.offset:
        return False
    sources = {part.tensor.name for part in planned.parts}
    plain = all(part.piece.form is keep and part.piece.columns is keep for part in planned.parts)
    return len(sources) == 1 and plain and not _is_whole(planned)


def _rebuild(planned: Planned, tensor: gguf.ReaderTensor) -> Dense:
    """Return a tensor of the model with the rows that the file has; the model computes with none of the others."""
    source = planned.parts[0].tensor
    whole = torch.zeros(source.shape, dtype=torch.float32)
    numbers, first = np.arange(source.shape[0])[:, None], 0
    for part in planned.parts:
        order = np.asarray(part.order(numbers)).reshape(-1)
        rows = gguf.quants.dequantize(tensor.data[first : first + len(order)], tensor.tensor_type)
        if part.piece.factor:
            whole[order] = torch.from_numpy(np.array(rows, dtype=np.float32)) / part.piece.factor
        first += len(order)
    return Dense(whole)


def _places(planned: Planned) -> Tensor | None:
    """Return the place in the file of each row of the model; None if their order is the same."""
    rows, part = planned.shape[0], planned.parts[0]
    numbers: Array = np.arange(rows)[:, None]
    order = np.asarray(part.order(numbers)).reshape(-1)
    if bool((order == numbers[:, 0]).all()):
        return None
    places = np.empty(rows, dtype=np.int64)
    places[order] = np.arange(rows)
    return torch.from_numpy(places)
