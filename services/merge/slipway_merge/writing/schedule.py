"""Which portion of which file a thread makes next.

As many files are under way as there are threads. A digest is a chain that only one thread at a time can lengthen, so threads keep
apart while there are files enough; otherwise several work ahead on the portions of one file.
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
    """An output file under way.

    Attributes:
        shard: What it is to hold.
        file: The file.
        portions: Those that nobody has taken yet but the next one, in the order of their places.
        written: What is in it so far.
        threads: How many threads work on it.
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
    """Hands out portions. Those of one file are taken in their order and only with their memory, so that whoever waits for
    earlier ones waits for someone who can go on.

    Args:
        shards: What is to be written; each has at least one portion.
        begin: Opens one of them.
        at_once: Number of files with portions to be taken at most.
        limit: Bytes of working memory at most; a portion that needs more than that alone is made alone.

    Attributes:
        open: Files under way.
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
        """Return the next portion for a thread, which waits for memory if need be; None when there is nothing left to do."""
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
        """Return a portion is done, and its memory free."""
        with self._changed:
            self._used -= portion.needs
            shard.threads -= 1
            if portion.end == shard.file.nbytes and shard.file.complete:
                self.open.remove(shard)
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand out nothing more, and let those who wait go."""
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
