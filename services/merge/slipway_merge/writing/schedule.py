"""Decide which portion of which file a thread writes next.

As many files are open as there are threads. A digest can only be extended by one thread at a time, so threads work on different files
while there are enough; otherwise several work ahead on the portions of one file.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from slipway_merge.plan.layout import Shard
from slipway_merge.writing.kept_shards import Written
from slipway_merge.writing.output_file import OutputFile
from slipway_merge.writing.portions import Portion


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

    Those of one file are taken in order and only when their memory is available, so a thread that waits for earlier portions waits
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
