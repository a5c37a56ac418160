"""Streams a planned merge to disk: block by block, every byte written once, at a place known beforehand.

Several tensors are worked on at once, each by one thread with a block of its own. Torch's own threads are switched off: they
wait for each other after every operation on a block, which on a busy machine costs ten times the work.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipway.errors import ModelMergeError, StageError
from slipway.stage import Context
from slipway_merge.deltas import Change, LowRank, compute_dtype, merge_block
from slipway_merge.layout import FLOATS, Layout, OutputTensor, Shard
from slipway_merge.tensor_io import TORCH_DTYPES, TensorReader, check_finite, row_blocks, torch_dtype

#: Largest block: it stays in the processor's cache through all passes over it, and its memory is reused, not mapped anew.
MAX_BLOCK_ELEMENTS = 1 << 18
#: Bytes of working memory per element of a block: input, two wide copies and two outputs at their widest.
_BYTES_PER_ELEMENT = 8 + 3 * 8 + 2 * 8
#: copy_file_range is refused between some file systems and by some kernels; the bytes are at hand, so they are written.
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY}


@dataclass
class Written:
    """What was written.

    Attributes:
        changes: What happened to each updated weight.
        copied: Number of tensors whose bytes were copied.
        converted: Number of tensors that only changed their data type.
        data_bytes: Bytes of tensor data.
    """

    changes: list[Change] = field(default_factory=list)
    copied: int = 0
    converted: int = 0
    data_bytes: int = 0


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
        ctx: Progress, cancellation and the memory budget.
    """

    def __init__(self, folder: Path, reader: TensorReader, ctx: Context) -> None:
        self.folder = folder
        self.reader = reader
        self.ctx = ctx
        self.threads = max(1, ctx.threads)
        budget = ctx.max_memory_bytes // (8 * self.threads * _BYTES_PER_ELEMENT)
        self.block_elements = min(MAX_BLOCK_ELEMENTS, max(1, budget))
        self.written = Written()
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
        with (
            disk_full_is_typed(self.folder),
            ThreadPoolExecutor(self.threads, "merge", initializer=torch.set_num_threads, initargs=(1,)) as pool,
        ):
            try:
                for shard in layout.shards:
                    self._write_shard(pool, shard, layout.data_bytes)
            except BaseException:
                self._stop.set()  # the threads end at their next block; leaving the pool waits for them
                raise
            if index := layout.index():
                (self.folder / index[0]).write_text(index[1], encoding="utf-8")
        self.written.changes.sort(key=lambda change: change.tensor)
        return self.written

    def _write_shard(self, pool: ThreadPoolExecutor, shard: Shard, total: int) -> None:
        path = self.folder / shard.filename
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, shard.nbytes)  # a full disk is found before the work, not after it
            _write_at(descriptor, memoryview(shard.header), 0)
            tasks = [pool.submit(self._write_tensor, descriptor, tensor) for tensor in shard.tensors]
            try:
                self._watch(tasks, total)
            finally:
                if any(not task.done() for task in tasks):
                    self._stop.set()
                wait([task for task in tasks if not task.cancel()])  # none may still write when the file is closed
        finally:
            os.close(descriptor)

    def _watch(self, tasks: list[Future[None]], total: int) -> None:
        """Report progress until all tasks are done or one fails, then raise what went wrong first in file order."""
        pending: set[Future[None]] = set(tasks)
        while pending:
            done, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                break
            self.ctx.progress("merge", done=self.written.data_bytes, total=total, unit="bytes")
        for task in tasks:
            if task.done():
                task.result()

    def _write_tensor(self, descriptor: int, tensor: OutputTensor) -> None:
        if tensor.value.update is not None:
            self._write_merged(descriptor, tensor)
        elif tensor.value.source.dtype == tensor.dtype:
            self._write_copy(descriptor, tensor)
            self._count(copied=1)
        else:
            self._write_converted(descriptor, tensor)
            self._count(converted=1)

    @property
    def _buffer(self) -> torch.Tensor:
        """This thread's block of input bytes."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = torch.empty(self.block_elements * 8, dtype=torch.uint8)
        buffer: torch.Tensor = self._local.buffer
        return buffer

    def _count(self, *, copied: int = 0, converted: int = 0, nbytes: int = 0, change: Change | None = None) -> None:
        with self._lock:
            self.written.copied += copied
            self.written.converted += converted
            self.written.data_bytes += nbytes
            if change is not None:
                self.written.changes.append(change)
        if nbytes and self._stop.is_set():
            raise StageError("another tensor of the merge failed", reason="CANCELLED")

    def _write_copy(self, descriptor: int, tensor: OutputTensor) -> None:
        source = tensor.value.source
        dtype = TORCH_DTYPES.get(source.dtype)
        buffer = self._buffer
        step = buffer.numel()
        for offset in range(0, source.nbytes, step):
            block = buffer[: min(step, source.nbytes - offset)]
            self.reader.fill(block, source, offset)
            if dtype is not None:
                check_finite(block.view(dtype), source.name, source.file.name)
            place = tensor.start + offset
            self._copy_range(descriptor, source.file, source.start + offset, place, block)
            self._count(nbytes=block.numel())

    def _copy_range(self, descriptor: int, file: Path, start: int, place: int, block: torch.Tensor) -> None:
        """Copy a range in the kernel (sharing the blocks where the file system can), or write the bytes at hand."""
        done = 0
        try:
            while done < block.numel():
                size = block.numel() - done
                count = os.copy_file_range(self.reader.descriptor(file), descriptor, size, start + done, place + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
        _write_at(descriptor, block.numpy().data[done:], place + done)

    def _write_converted(self, descriptor: int, tensor: OutputTensor) -> None:
        source, output = tensor.value.source, TORCH_DTYPES[tensor.dtype]
        for first, rows, block in self._blocks(tensor):
            check_finite(block, source.name, source.file.name)
            converted = block.to(output)
            check_finite(converted, source.name, "the merged result")
            self._write_block(descriptor, tensor, converted, first, rows)

    def _write_merged(self, descriptor: int, tensor: OutputTensor) -> None:
        update, output = tensor.value.update, torch_dtype(tensor.value.source)
        assert update is not None
        if tensor.dtype in FLOATS:
            output = TORCH_DTYPES[tensor.dtype]
        low_rank = LowRank(update, self.reader, compute_dtype(output))
        change = Change(update.module, tensor.name, update.rank, update.scaling, delta_norm=low_rank.norm())
        for first, rows, block in self._blocks(tensor):
            merged = merge_block(block, low_rank, first, output=output, change=change)
            self._write_block(descriptor, tensor, merged, first, rows)
        self._count(change=change)

    def _blocks(self, tensor: OutputTensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first row, rows, the source's values) of each block; the values are valid until the next one."""
        source = tensor.value.source
        dtype = torch_dtype(source)
        row_bytes = source.nbytes // max(source.shape[0], 1) if source.shape else source.nbytes
        shape = source.shape[1:]
        for first, rows in row_blocks(source.shape, self.block_elements):
            size = rows * row_bytes
            whole = self._buffer
            buffer = whole[:size] if size <= whole.numel() else torch.empty(size, dtype=torch.uint8)
            self.reader.fill(buffer, source, first * row_bytes)
            yield first, rows, buffer.view(dtype).reshape(rows, *shape) if source.shape else buffer.view(dtype)

    def _write_block(self, descriptor: int, tensor: OutputTensor, block: torch.Tensor, first: int, rows: int) -> None:
        raw = block.contiguous().reshape(-1).view(torch.uint8).numpy()
        row_bytes = raw.nbytes // max(rows, 1)
        _write_at(descriptor, raw.data, tensor.start + first * row_bytes)
        self._count(nbytes=raw.nbytes)


def _write_at(descriptor: int, view: memoryview, position: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count


def relative_changes(changes: list[Change]) -> list[Mapping[str, object]]:
    """Per-module facts for the report."""
    return [
        {
            "module": change.module,
            "tensor": change.tensor,
            "rank": change.rank,
            "scaling": change.scaling,
            "relative_change": round(min(change.relative_change, 1e30), 8),
            "unchanged_share": round(change.unchanged_share, 6),
        }
        for change in changes
    ]
