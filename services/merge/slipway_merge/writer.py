"""Streams a planned merge to disk: block by block, every byte written once, at a place known beforehand.

Several tensors are worked on at once, each by one thread with a block of its own, as many as the memory budget has room for.
Each thread computes by itself: libraries that spread one block over threads of their own wait for each other after every step.
"""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from slipway.errors import ModelMergeError, StageError
from slipway.stage import Context
from slipway_merge.block import Block
from slipway_merge.budget import MemoryBudget
from slipway_merge.deltas import Change, LowRank, compute_type, round_block
from slipway_merge.kept_shards import KeptShards, Written
from slipway_merge.layout import Layout, OutputTensor, Shard
from slipway_merge.output_file import OutputFile
from slipway_merge.tensor_io import Array, TensorReader, float_type, row_blocks

#: Elements of a block: few enough to stay in the processor's cache through all passes over them.
BLOCK_ELEMENTS = 1 << 17
#: Bytes of working memory per element of a block: base, two wide copies, rounded result, and what differs.
_BYTES_PER_ELEMENT = 8 + 2 * 8 + 8 + 1
#: Bytes copied between two looks at whether the merge was cancelled.
_COPY_BYTES = 64 << 20


@contextmanager
def disk_full_is_typed(folder: Path) -> Iterator[None]:
    """Turn the operating system's "no space left" into the error users and recovery rules know.

    Raises:
        ModelMergeError: ``DISK_FULL``.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ModelMergeError(
            f"no space left for the merged model in {folder}",
            reason="DISK_FULL",
            remedy="free some space or set output and SLIPWAY_HOME to another disk",
            about={"folder": folder},
        ) from error


class MergeWriter:
    """Writes the files of a layout.

    Args:
        folder: Existing, empty output folder.
        reader: Where stored tensors are read.
        ctx: Progress, cancellation, threads and what an interrupted attempt kept; is told the digests.
        max_memory_bytes: What all threads together should stay below.

    Attributes:
        written: What is in all files.
        resumed: How many of them an earlier attempt wrote.
    """

    def __init__(self, folder: Path, reader: TensorReader, ctx: Context, *, max_memory_bytes: int) -> None:
        self.folder = folder
        self.reader = reader
        self.ctx = ctx
        self.threads = max(1, ctx.threads)
        self.budget = MemoryBudget(max_memory_bytes)
        self.written = Written()
        self.resumed = 0
        self._kept = KeptShards(ctx.kept)
        self._shard = Written()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._local = threading.local()

    def write(self, layout: Layout) -> Written:
        """Write all shards and the index.

        Raises:
            ModelMergeError: ``NON_FINITE_WEIGHTS``, ``DTYPE_UNSUPPORTED`` or ``DISK_FULL``.
            CheckpointValidationError: ``SAFETENSORS_CORRUPT`` when an input became shorter.
            StageError: ``CANCELLED``.
        """
        with disk_full_is_typed(self.folder), ThreadPoolExecutor(self.threads, "merge") as pool:
            for shard in layout.shards:
                self._write_shard(pool, shard, layout.data_bytes)
            if index := layout.index():
                (self.folder / index[0]).write_text(index[1], encoding="utf-8")
        self.written.changes.sort(key=lambda change: change.tensor)
        return self.written

    def _write_shard(self, pool: ThreadPoolExecutor, shard: Shard, total: int) -> None:
        path = self.folder / shard.filename
        if kept := self._kept.take(shard, path, on_bytes=lambda count: self._progress(count, total)):
            self.resumed += 1
            self.written.add(kept.written)
            self.ctx.digest(path, kept.sha256)
            return
        self._shard = Written()
        with OutputFile(path, shard.nbytes) as file:
            file.write(memoryview(shard.header), 0)
            tasks = [pool.submit(self._write_piece, file, piece) for piece in shard.pieces()]
            try:
                self._watch(tasks, total)
            finally:
                if any(not task.done() for task in tasks):
                    self._stop.set()  # the threads end at their next block
                wait([task for task in tasks if not task.cancel()])  # none may still write when the file is closed
            sha256 = file.digest()
        self.written.add(self._shard)
        self.ctx.digest(path, sha256)
        self._kept.keep(shard, path, sha256=sha256, written=self._shard)

    def _watch(self, tasks: list[Future[None]], total: int) -> None:
        """Report progress until all tasks are done or one fails, then raise what went wrong first in file order."""
        pending: set[Future[None]] = set(tasks)
        while pending:
            done, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                break
            self._progress(self._shard.data_bytes, total)
        for task in tasks:
            if task.done():
                task.result()

    def _progress(self, of_shard: int, total: int) -> None:
        self.ctx.progress("merge", done=min(self.written.data_bytes + of_shard, total), total=total, unit="bytes")

    def _write_piece(self, file: OutputFile, piece: tuple[OutputTensor, ...]) -> None:
        first = piece[0]
        if first.untouched:
            self._copy(file, piece)
        elif first.value.computed is not None:
            self._write_computed(file, first)
        elif first.value.update is not None:
            self._write_updated(file, first)
        else:
            with self.budget.reserve(_block_bytes(first)):
                self._write_rounded(file, first, Change(module="", tensor=first.value.source.name), None)
            self._count(converted=1)

    def _copy(self, file: OutputFile, piece: tuple[OutputTensor, ...]) -> None:
        """Copy tensors that lie side by side, then look through their source, which is in memory now."""
        source = self.reader.descriptor(piece[0].value.source.file)
        position, end = piece[0].start, piece[-1].start + piece[-1].nbytes
        ahead = piece[0].value.source.start - position
        while position < end and not self._stop.is_set():
            count = file.copy(source, position + ahead, position, min(_COPY_BYTES, end - position))
            if count == 0:
                break  # the source became shorter, which the scan finds and names
            position += count
        for tensor in piece:
            for nbytes in self.reader.scan(tensor.value.source):
                self._count(nbytes=nbytes)
        self._count(copied=len(piece))

    def _write_updated(self, file: OutputFile, tensor: OutputTensor) -> None:
        update = tensor.value.update
        assert update is not None
        wide = compute_type(tensor.dtype)
        factors = (update.left.info.numel + update.right.info.numel) * (wide.itemsize + 16)
        with self.budget.reserve(factors + _block_bytes(tensor)):
            low_rank = LowRank(update, self.reader, wide)
            change = Change(update.module, tensor.name, rank=update.rank, scaling=update.scaling)
            change.change_sum = low_rank.square()
            self._write_rounded(file, tensor, change, low_rank.add)
        self._count(change=change)

    def _write_computed(self, file: OutputFile, tensor: OutputTensor) -> None:
        computed = tensor.value.computed
        assert computed is not None
        wide = compute_type(tensor.dtype)
        needed = 4 * tensor.value.source.numel * wide.itemsize  # the values, and what making them takes
        with self.budget.reserve(needed + _block_bytes(tensor)):
            values = computed.compute(wide)
            if values.shape != tensor.shape:
                raise ModelMergeError(
                    f"{computed.form} gave values of shape {values.shape} for {tensor.name!r} of shape {tensor.shape}",
                    reason="ADAPTER_BASE_MISMATCH",
                    remedy="the adapter was trained on another base model: check base_model.name",
                    about={"tensor": tensor.name, "shape": values.shape, "base_shape": tensor.shape},
                )
            values = np.atleast_1d(values)
            change = Change(computed.module, tensor.name, form=computed.form)

            def take(first: int, base: Array, spare: Array) -> Array:
                new = values[first : first + len(base)].reshape(base.shape)
                difference = np.subtract(new, base, out=spare).reshape(-1)
                change.change_sum += float(np.dot(difference, difference))
                return new

            self._write_rounded(file, tensor, change, take)
        self._count(change=change)

    def _write_rounded(
        self, file: OutputFile, tensor: OutputTensor, change: Change, step: Callable[[int, Array, Array], Array] | None
    ) -> None:
        """Write a tensor block by block; ``step`` gives the new values of rows, by the first one's number."""
        source = tensor.value.source
        dtype, block = float_type(source), self._block
        rows = source.shape[0] if source.shape else 1
        columns = source.numel // max(rows, 1)
        for first, count in row_blocks((rows, columns), BLOCK_ELEMENTS):
            base = block.array("base", dtype, (count, columns))
            self.reader.fill(base.reshape(-1).view(np.uint8), source, first * columns * dtype.itemsize)
            add = None if step is None else partial(step, first)
            rounded = round_block(base, source=source.dtype, output=tensor.dtype, block=block, change=change, add=add)
            file.write(rounded.reshape(-1).view(np.uint8).data, tensor.start + first * columns * rounded.itemsize)
            self._count(nbytes=rounded.nbytes)

    @property
    def _block(self) -> Block:
        """This thread's working memory."""
        if not hasattr(self._local, "block"):
            self._local.block = Block()
        block: Block = self._local.block
        return block

    def _count(self, *, copied: int = 0, converted: int = 0, nbytes: int = 0, change: Change | None = None) -> None:
        with self._lock:
            self._shard.copied += copied
            self._shard.converted += converted
            self._shard.data_bytes += nbytes
            if change is not None:
                self._shard.changes.append(change)
        if nbytes and self._stop.is_set():
            raise StageError("another tensor of the merge failed", reason="CANCELLED")


def _block_bytes(tensor: OutputTensor) -> int:
    """Working memory for the blocks of a tensor."""
    columns = math.prod(tensor.value.source.shape[1:])
    return max(BLOCK_ELEMENTS, columns) * _BYTES_PER_ELEMENT


def relative_changes(changes: list[Change]) -> list[Mapping[str, object]]:
    """Per-module facts for the report."""
    return [
        {
            "module": change.module,
            "tensor": change.tensor,
            "form": change.form,
            "rank": change.rank,
            "scaling": change.scaling,
            "relative_change": round(min(change.relative_change, 1e30), 8),
            "unchanged_share": round(change.unchanged_share, 6),
        }
        for change in changes
    ]
