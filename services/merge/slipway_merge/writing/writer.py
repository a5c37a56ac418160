"""Stream a planned merge to disk portion by portion; every byte is written once, at a place known beforehand.

Each thread computes its own portions: libraries that spread one block over several threads wait for each other after every step.

As many files are open as there are threads. A digest can only be extended by one thread at a time, so threads work on different
files while there are enough; otherwise several work ahead on the portions of one file.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from slipway.stage import Context
from slipway_merge.tensors.deltas import Change
from slipway_merge.tensors.kernel import Block
from slipway_merge.tensors.outputs import Layout, Shard
from slipway_merge.tensors.tensor_io import TensorReader
from slipway_merge.writing.output_file import Abandoned, KeptShards, OutputFile, Written
from slipway_merge.writing.portions import Portion, portions


class MergeWriter:
    """Writes the files of a layout.

    Args:
        folder: Existing, empty output folder.
        reader: Reads stored tensors.
        ctx: Progress, cancellation, threads, and the kept folder of an interrupted attempt; gets the digests.
        max_memory_bytes: Memory limit of all threads together.

    Attributes:
        written: Statistics of all finished files.
        resumed: Number of files written by an earlier attempt.
    """

    def __init__(self, folder: Path, reader: TensorReader, ctx: Context, *, max_memory_bytes: int) -> None:
        self.folder = folder
        self.reader = reader
        self.ctx = ctx
        self.threads = max(1, ctx.threads)
        self.max_memory_bytes = max_memory_bytes
        self.written = Written()
        self.resumed = 0
        self._kept = KeptShards(ctx.kept)
        self._done = 0
        self._failures: list[tuple[str, int, Exception]] = []
        self._lock = threading.Lock()

    def write(self, layout: Layout) -> Written:
        """Write all shards and the index.

        Raises:
            ModelMergeError: ``NON_FINITE_WEIGHTS`` or ``DTYPE_UNSUPPORTED``.
            CheckpointValidationError: ``SAFETENSORS_CORRUPT`` if an input became shorter.
            StageError: ``CANCELLED``.
            OSError: For example ENOSPC.
        """
        total = sum(shard.nbytes for shard in layout.shards)
        missing = [shard for shard in layout.shards if not self._resume(shard, total)]
        schedule = Schedule(missing, self._begin, at_once=self.threads, limit=self.max_memory_bytes)
        self._run(schedule, total)
        if index := layout.index():
            (self.folder / index[0]).write_text(index[1], encoding="utf-8")
        self.written.changes.sort(key=lambda change: change.tensor)
        return self.written

    def _resume(self, shard: Shard, total: int) -> bool:
        """Reuse a shard that an earlier attempt finished; return whether there was one."""
        path = self.folder / shard.filename
        kept = self._kept.take(shard, path, on_bytes=lambda count: self._progress(count, total))
        if kept is None:
            return False
        self.resumed += 1
        self._done += shard.nbytes
        self.written.add(kept.written)
        self.ctx.digest(path, kept.sha256)
        return True

    def _begin(self, shard: Shard) -> OpenShard:
        written = Written(copied=shard.copied, converted=shard.converted)
        file = OutputFile(self.folder / shard.filename, shard.nbytes)
        return OpenShard(shard, file, portions(shard, self.reader, written.changes), written)

    def _run(self, schedule: Schedule, total: int) -> None:
        """Run the threads and show progress until they are done; raise the first failure in file order."""
        with ThreadPoolExecutor(self.threads, "merge") as pool:
            tasks: set[Future[None]] = {pool.submit(self._work, schedule) for _ in range(self.threads)}
            try:
                pending = tasks
                while pending and not any(task.done() and task.exception() for task in tasks):
                    _, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
                    self._progress(0, total)
            finally:
                schedule.stop()
                wait(tasks)  # no thread may write when a file is closed
                for shard in schedule.open:
                    shard.file.close()
        if self._failures:
            raise min(self._failures, key=lambda failure: failure[:2])[2]
        for task in tasks:
            task.result()

    def _progress(self, more: int, total: int) -> None:
        self.ctx.progress("merge", done=self._done + more, total=total, unit="bytes")

    def _work(self, schedule: Schedule) -> None:
        """Write portions until none are left."""
        block = Block()
        while taken := schedule.take():
            shard, portion = taken
            try:
                self._make(shard, portion, block)
            except Abandoned:
                return
            except Exception as error:
                with self._lock:
                    self._failures.append((shard.shard.filename, portion.start, error))
                raise
            finally:
                schedule.give_back(shard, portion)

    def _make(self, shard: OpenShard, portion: Portion, block: Block) -> None:
        part = portion.change.blank()
        view = portion.fill(shard.file, block, part)
        with shard.file.turn(portion.start, portion.end, view):
            portion.change.add(part)  # in file order, because a sum of floats depends on the order
        with self._lock:
            self._done += portion.end - portion.start
        if portion.end == shard.file.nbytes:
            self._finish(shard)

    def _finish(self, shard: OpenShard) -> None:
        sha256, path = shard.file.digest(), self.folder / shard.shard.filename
        shard.file.close()
        self._kept.keep(shard.shard, path, sha256=sha256, written=shard.written)
        with self._lock:
            self.written.add(shard.written)
            self.ctx.digest(path, sha256)


def relative_changes(changes: list[Change]) -> list[Mapping[str, object]]:
    """Return facts for the report by module; the relative change of a weight whose base is zero where it was measured is unknown."""
    return [
        {
            "module": change.module,
            "tensor": change.tensor,
            "form": change.form,
            "rank": change.rank,
            "scaling": change.scaling,
            "relative_change": round(change.relative_change, 8) if math.isfinite(change.relative_change) else None,
            "unchanged_share": round(change.unchanged_share, 6),
        }
        for change in changes
    ]


@dataclass
class OpenShard:
    """An output file being written.

    Attributes:
        shard: Its plan.
        file: The file.
        portions: The portions after the next one, in file order.
        written: Statistics of its content so far.
        threads: Number of threads that work on it.
        next: The portion to be taken next.
    """

    shard: Shard
    file: OutputFile
    portions: Iterator[Portion]
    written: Written = field(default_factory=Written)
    threads: int = 0
    next: Portion | None = None

    def __post_init__(self) -> None:
        self.next = next(self.portions, None)

    def take(self) -> Portion:
        """Take the next portion."""
        taken, self.next = self.next, next(self.portions, None)
        assert taken is not None
        return taken


class Schedule:
    """Hands out portions.

    It hands out a file's portions in order, and only when their memory is available. So a thread that waits for earlier portions waits
    for threads that can continue.

    Args:
        shards: The files to write; each has at least one portion.
        begin: Opens one of them.
        at_once: Most files with portions left to take.
        limit: Most bytes of working memory; a portion that needs more is written alone.

    Attributes:
        open: Files being written.
    """

    def __init__(
        self, shards: Iterable[Shard], begin: Callable[[Shard], OpenShard], *, at_once: int, limit: int
    ) -> None:
        self.open: list[OpenShard] = []
        self._waiting = deque(shards)
        self._begin = begin
        self._at_once = at_once
        self._limit = limit
        self._used = 0
        self._stopped = False
        self._changed = threading.Condition()

    def take(self) -> tuple[OpenShard, Portion] | None:
        """Return the next portion for a thread, after waiting for its memory; None if nothing is left."""
        with self._changed:
            while not self._stopped:
                shard = self._least_busy()
                if shard is None or shard.next is None:
                    return None
                if self._used == 0 or self._used + shard.next.needs <= self._limit:
                    self._used += shard.next.needs
                    shard.threads += 1
                    return shard, shard.take()
                self._changed.wait()
        return None

    def give_back(self, shard: OpenShard, portion: Portion) -> None:
        """Mark a portion as done and its memory as free."""
        with self._changed:
            self._used -= portion.needs
            shard.threads -= 1
            if portion.end == shard.file.nbytes and shard.file.complete:
                self.open.remove(shard)
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand out nothing more, and wake all waiting threads."""
        with self._changed:
            self._stopped = True
            for shard in self.open:
                shard.file.abandon()
            self._changed.notify_all()

    def _least_busy(self) -> OpenShard | None:
        ready = [shard for shard in self.open if shard.next is not None]
        if self._waiting and len(ready) < self._at_once:
            ready.append(self._begin(self._waiting.popleft()))
            self.open.append(ready[-1])
        return min(ready, key=lambda shard: shard.threads, default=None)
