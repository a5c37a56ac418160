"""The portions of an output file, each written by one thread with a block of working memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from slipway.errors import ModelMergeError
from slipway.model.safetensors_file import corrupt_error
from slipway_merge.tensors.deltas import Change, LowRank, compute_type, merge_block, round_block
from slipway_merge.tensors.kernel import Block
from slipway_merge.tensors.outputs import Computed, OutputTensor, Shard
from slipway_merge.tensors.tensor_io import Array, TensorReader, float_type, row_blocks
from slipway_merge.writing.output_file import OutputFile

#: Elements of a block: few enough to stay in the processor's cache through all passes over them.
BLOCK_ELEMENTS = 1 << 18
#: Bytes of working memory per element of a block: base, two wide copies, rounded result, and a mask of differences.
_BYTES_PER_ELEMENT = 8 + 2 * 8 + 8 + 1
_COPY_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Portion(ABC):
    """Bytes of an output file that are written at once.

    Attributes:
        start: Their beginning in the file.
        end: Their end.
        change: Statistics of their weight.
    """

    start: int
    end: int
    change: Change = field(default_factory=lambda: Change("", ""))

    @property
    def needs(self) -> int:
        """Bytes of working memory."""
        return 0

    @abstractmethod
    def fill(self, file: OutputFile, block: Block, part: Change, /) -> memoryview | None:
        """Write the bytes.

        Args:
            file: The output file.
            block: Working memory.
            part: Statistics of this portion, to be filled.

        Returns:
            The bytes, valid while the block holds them; None if they must be read back.
        """


def portions(shard: Shard, reader: TensorReader, changes: list[Change]) -> Iterator[Portion]:
    """Yield all portions of a file in order. Sources are read when a portion is written.

    Args:
        shard: The plan of the file.
        reader: Reads base and adapter.
        changes: Extended by an entry for every changed weight, before its first portion.
    """
    yield Header(start=0, end=len(shard.header), header=shard.header)
    for piece in shard.pieces():
        tensor, value = piece[0], piece[0].value
        if tensor.untouched:
            yield from _copied_portions(piece, reader)
        elif value.computed is not None:
            changes.append(Change(value.computed.module, tensor.name, form=value.computed.form))
            end = tensor.start + tensor.nbytes
            yield Whole(start=tensor.start, end=end, change=changes[-1], tensor=tensor, reader=reader)
        elif value.update is not None:
            update = value.update
            changes.append(Change(update.module, tensor.name, rank=update.rank, scaling=update.scaling))
            wide = compute_type(tensor.dtype, value.source.dtype)
            yield from _row_portions(tensor, reader, changes[-1], LowRank(update, reader, wide))
        else:
            yield from _row_portions(tensor, reader, Change("", value.source.name), None)


def _copied_portions(piece: tuple[OutputTensor, ...], reader: TensorReader) -> Iterator[Portion]:
    last = piece[-1].start + piece[-1].nbytes
    for start in range(piece[0].start, last, _COPY_BYTES):
        yield Copied(start=start, end=min(start + _COPY_BYTES, last), piece=piece, reader=reader)


def _row_portions(
    tensor: OutputTensor, reader: TensorReader, change: Change, update: LowRank | None
) -> Iterator[Portion]:
    rows, columns = matrix_shape(tensor)
    row_bytes = tensor.nbytes // max(rows, 1)
    for first, count in row_blocks((rows, columns), BLOCK_ELEMENTS):
        start = tensor.start + first * row_bytes
        end = start + count * row_bytes
        yield Rows(
            start=start, end=end, change=change, tensor=tensor, reader=reader, first=first, count=count, update=update
        )


@dataclass(frozen=True, kw_only=True)
class Header(Portion):
    """The header of a safetensors file."""

    header: bytes

    def fill(self, file: OutputFile, _block: Block, _part: Change, /) -> memoryview:
        """Write the header."""
        file.write(memoryview(self.header), 0)
        return memoryview(self.header)


@dataclass(frozen=True, kw_only=True)
class Copied(Portion):
    """Bytes of untouched tensors that are also adjacent in their source."""

    piece: tuple[OutputTensor, ...]
    reader: TensorReader

    def fill(self, file: OutputFile, _block: Block, _part: Change, /) -> None:
        """Copy the bytes, then scan their source for NaN and infinity while it is cached."""
        origin = self.piece[0].value.source
        source, ahead = self.reader.descriptor(origin.file), origin.start - self.piece[0].start
        position = self.start
        while position < self.end:
            count = file.copy(source, position + ahead, position, self.end - position)
            if count == 0:
                [name] = [one.name for one in self.piece if one.start <= position < one.start + one.nbytes]
                raise corrupt_error(
                    origin.file, f"it ends at byte {position + ahead}, within tensor {name!r}", tensor=name
                )
            position += count
        for tensor in self.piece:
            first, last = max(self.start, tensor.start), min(self.end, tensor.start + tensor.nbytes)
            if first < last:
                self.reader.scan(tensor.value.source, first - tensor.start, last - tensor.start)


@dataclass(frozen=True, kw_only=True)
class Rows(Portion):
    """Rows of a weight with a low-rank update, or only converted."""

    tensor: OutputTensor
    reader: TensorReader
    first: int
    count: int
    update: LowRank | None

    @property
    def needs(self) -> int:
        """Bytes for a block and the update's factors."""
        return _block_bytes(self.tensor) + (self.update.nbytes if self.update else 0)

    def fill(self, file: OutputFile, block: Block, part: Change, /) -> memoryview:
        """Read, compute and write the rows."""
        base = read_rows(self.tensor, self.reader, self.first, self.count, block)
        source, output = self.tensor.value.source.dtype, self.tensor.dtype
        if self.update is None:
            rounded = round_block(base, source=source, output=output, block=block, change=part, add=None)
        else:
            rounded = merge_block(
                base, self.update, first_row=self.first, source=source, output=output, block=block, change=part
            )
        view = rounded.reshape(-1).view(np.uint8).data
        file.write(view, self.start)
        return view


@dataclass(frozen=True, kw_only=True)
class Whole(Portion):
    """A weight that is computed, as a whole or block by block, then rounded and written block by block."""

    tensor: OutputTensor
    reader: TensorReader

    @property
    def needs(self) -> int:
        """Bytes for the values, their computation, and a block."""
        source = self.tensor.value.source
        wide = compute_type(self.tensor.dtype, source.dtype)
        count = source.numel
        if self._computed.part is not None:
            count = min(count, max(BLOCK_ELEMENTS, matrix_shape(self.tensor)[1]))
        return 4 * count * wide.itemsize + _block_bytes(self.tensor)

    def fill(self, file: OutputFile, block: Block, part: Change, /) -> None:
        """Compute the weight, then round and write it."""
        shape = matrix_shape(self.tensor)
        values = self._values().reshape(shape) if self._computed.part is None else None
        source, output = self.tensor.value.source.dtype, self.tensor.dtype
        position = self.start
        for first, count in row_blocks(shape, BLOCK_ELEMENTS):
            new = self._part(first, count) if values is None else values[first : first + count]

            def take(base: Array, spare: Array, new: Array = new) -> Array:
                difference = np.subtract(new, base, out=spare).reshape(-1)
                part.change_sum += float(np.dot(difference, difference))
                return new

            base = read_rows(self.tensor, self.reader, first, count, block)
            rounded = round_block(base, source=source, output=output, block=block, change=part, add=take)
            file.write(rounded.reshape(-1).view(np.uint8).data, position)
            position += rounded.nbytes

    @property
    def _computed(self) -> Computed:
        computed = self.tensor.value.computed
        assert computed is not None
        return computed

    def _part(self, first: int, count: int) -> Array:
        part, wide = self._computed.part, compute_type(self.tensor.dtype, self.tensor.value.source.dtype)
        assert part is not None
        values: Array = part(wide, slice(first, first + count)).reshape(count, -1)
        return values

    def _values(self) -> Array:
        computed = self._computed
        values = computed.compute(compute_type(self.tensor.dtype, self.tensor.value.source.dtype))
        if values.shape != self.tensor.shape:
            raise ModelMergeError(
                f"{computed.form} gave values of shape {values.shape} for {self.tensor.name!r} of shape {self.tensor.shape}",
                reason="ADAPTER_BASE_MISMATCH",
                remedy="the adapter was trained on another base model: use the one that its adapter_config.json names",
                about={"tensor": self.tensor.name, "shape": values.shape, "base_shape": self.tensor.shape},
            )
        return values


def read_rows(tensor: OutputTensor, reader: TensorReader, first: int, count: int, block: Block) -> Array:
    """Return stored rows as (count, columns)."""
    dtype = float_type(tensor.value.source)
    columns = matrix_shape(tensor)[1]
    base = block.array("base", dtype, (count, columns))
    reader.fill(base.reshape(-1).view(np.uint8), tensor.value.source, first * columns * dtype.itemsize)
    return base


def matrix_shape(tensor: OutputTensor) -> tuple[int, int]:
    """Return rows and columns, with all dimensions but the first taken together."""
    shape = tensor.value.source.shape
    return (shape[0] if shape else 1), math.prod(shape[1:])


def _block_bytes(tensor: OutputTensor) -> int:
    return max(BLOCK_ELEMENTS, matrix_shape(tensor)[1]) * _BYTES_PER_ELEMENT
