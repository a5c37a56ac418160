"""The portions that an output file is made of, each by one thread with a block of working memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from slipway.errors import ModelMergeError
from slipway.safetensors_file import corrupt
from slipway_merge.block import Block
from slipway_merge.deltas import Change, LowRank, compute_type, merge_block, round_block
from slipway_merge.layout import OutputTensor, Shard
from slipway_merge.output_file import OutputFile
from slipway_merge.tensor_io import Array, TensorReader, float_type, row_blocks

#: Elements of a block: few enough to stay in the processor's cache through all passes over them.
BLOCK_ELEMENTS = 1 << 17
#: Bytes of working memory per element of a block: base, two wide copies, rounded result, and what differs.
_BYTES_PER_ELEMENT = 8 + 2 * 8 + 8 + 1
#: Bytes copied between two looks at whether the merge was cancelled.
_COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Portion:
    """Bytes of an output file that are made at once.

    Attributes:
        start: Where they begin in the file.
        end: Where they end.
        needs: Bytes of working memory.
        fill: Writes them, and accounts for them. Answers them while the block still holds them, otherwise None.
        change: Of the weight they belong to, where it is counted.
    """

    start: int
    end: int
    needs: int
    fill: Callable[[OutputFile, Block, Change], memoryview | None]
    change: Change


def portions(shard: Shard, reader: TensorReader, changes: list[Change]) -> Iterator[Portion]:
    """All portions of a file in the order of their places. Sources are read when a portion is made.

    Args:
        shard: What the file is to hold.
        reader: Reads base and adapter.
        changes: Is told of every weight that is changed, when its first portion is given.
    """
    yield Portion(0, len(shard.header), 0, partial(_write_header, shard.header), Change("", "header"))
    for piece in shard.pieces():
        first = piece[0]
        if first.untouched:
            yield from _copied(piece, reader)
        elif (computed := first.value.computed) is not None:
            change = Change(computed.module, first.name, form=computed.form)
            changes.append(change)
            # The values, and what making them takes.
            needs = 4 * first.value.source.numel * compute_type(first.dtype).itemsize + _block_bytes(first)
            yield Portion(
                first.start, first.start + first.nbytes, needs, partial(_write_computed, first, reader), change
            )
        elif (update := first.value.update) is not None:
            change = Change(update.module, first.name, rank=update.rank, scaling=update.scaling)
            changes.append(change)
            yield from _rows(first, reader, change, LowRank(update, reader, compute_type(first.dtype)))
        else:
            yield from _rows(first, reader, Change("", first.value.source.name), None)


def _write_header(header: bytes, file: OutputFile, _block: Block, _change: Change) -> memoryview:
    view = memoryview(header)
    file.write(view, 0)
    return view


def _copied(piece: tuple[OutputTensor, ...], reader: TensorReader) -> Iterator[Portion]:
    """Tensors that lie side by side in their source too: copied, then looked through in their source, which is in memory now."""
    position, end = piece[0].start, piece[-1].start + piece[-1].nbytes
    ahead = piece[0].value.source.start - position
    for start in range(position, end, _COPY_BYTES):
        stop = min(start + _COPY_BYTES, end)
        yield Portion(start, stop, 0, partial(_copy, piece, reader, start, stop, ahead), Change("", piece[0].name))


def _copy(
    piece: tuple[OutputTensor, ...],
    reader: TensorReader,
    start: int,
    end: int,
    ahead: int,
    file: OutputFile,
    _block: Block,
    _change: Change,
) -> None:
    origin = piece[0].value.source
    source = reader.descriptor(origin.file)
    position = start
    while position < end:
        count = file.copy(source, position + ahead, position, end - position)
        if count == 0:
            [tensor] = [one for one in piece if one.start <= position < one.start + one.nbytes]
            source_end = position + ahead
            raise corrupt(
                origin.file, f"it ends at byte {source_end}, within tensor {tensor.name!r}", tensor=tensor.name
            )
        position += count
    for tensor in piece:
        first, last = max(start, tensor.start), min(end, tensor.start + tensor.nbytes)
        if first < last:
            reader.scan(tensor.value.source, first - tensor.start, last - tensor.start)


def _rows(tensor: OutputTensor, reader: TensorReader, change: Change, low_rank: LowRank | None) -> Iterator[Portion]:
    """Blocks of rows, as they are or after an update."""
    rows, columns = _matrix(tensor)
    row_bytes = tensor.nbytes // max(rows, 1)
    needs = _block_bytes(tensor) + (low_rank.nbytes if low_rank else 0)
    for first, count in row_blocks((rows, columns), BLOCK_ELEMENTS):
        start = tensor.start + first * row_bytes
        fill = partial(_write_rows, tensor, reader, low_rank, first, count)
        yield Portion(start, start + count * row_bytes, needs, fill, change)


def _write_rows(
    tensor: OutputTensor,
    reader: TensorReader,
    low_rank: LowRank | None,
    first: int,
    count: int,
    file: OutputFile,
    block: Block,
    change: Change,
) -> memoryview:
    base = _base_rows(tensor, reader, first, count, block)
    types = {"source": tensor.value.source.dtype, "output": tensor.dtype}
    if low_rank is None:
        rounded = round_block(base, block=block, change=change, add=None, **types)
    else:
        rounded = merge_block(base, low_rank, first_row=first, block=block, change=change, **types)
    view = rounded.reshape(-1).view(np.uint8).data
    file.write(view, tensor.start + first * (tensor.nbytes // _matrix(tensor)[0]))
    return view


def _write_computed(tensor: OutputTensor, reader: TensorReader, file: OutputFile, block: Block, change: Change) -> None:
    """A weight that is computed whole; rounded and written block by block."""
    computed = tensor.value.computed
    assert computed is not None
    values = computed.compute(compute_type(tensor.dtype))
    if values.shape != tensor.shape:
        raise ModelMergeError(
            f"{computed.form} gave values of shape {values.shape} for {tensor.name!r} of shape {tensor.shape}",
            reason="ADAPTER_BASE_MISMATCH",
            remedy="the adapter was trained on another base model: check base_model.name",
            about={"tensor": tensor.name, "shape": values.shape, "base_shape": tensor.shape},
        )
    values = values.reshape(_matrix(tensor))
    for first, count in row_blocks(values.shape, BLOCK_ELEMENTS):

        def take(base: Array, spare: Array, first: int = first) -> Array:
            new = values[first : first + len(base)]
            difference = np.subtract(new, base, out=spare).reshape(-1)
            change.change_sum += float(np.dot(difference, difference))
            return new

        base = _base_rows(tensor, reader, first, count, block)
        rounded = round_block(
            base, source=tensor.value.source.dtype, output=tensor.dtype, block=block, change=change, add=take
        )
        file.write(rounded.reshape(-1).view(np.uint8).data, tensor.start + first * (tensor.nbytes // len(values)))


def _base_rows(tensor: OutputTensor, reader: TensorReader, first: int, count: int, block: Block) -> Array:
    source = tensor.value.source
    dtype = float_type(source)
    columns = _matrix(tensor)[1]
    base = block.array("base", dtype, (count, columns))
    reader.fill(base.reshape(-1).view(np.uint8), source, first * columns * dtype.itemsize)
    return base


def _matrix(tensor: OutputTensor) -> tuple[int, int]:
    """Rows and columns, all dimensions but the first taken together."""
    shape = tensor.value.source.shape
    return (shape[0] if shape else 1), math.prod(shape[1:])


def _block_bytes(tensor: OutputTensor) -> int:
    """Working memory for the blocks of a tensor."""
    return max(BLOCK_ELEMENTS, _matrix(tensor)[1]) * _BYTES_PER_ELEMENT
