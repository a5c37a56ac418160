"""Let several copies of a small model compute different windows at the same time, each in a thread of its own.

Products of a small model are too short to divide: two threads in each of them do hardly more than one. Two copies of the model, whose
weights are the same mapped files, keep two cores busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

_T = TypeVar("_T")
_R = TypeVar("_R")


class Crew:
    """Threads that share work by its place in a list, so that results do not depend on which of them is quicker.

    Args:
        count: Number of members; one member works in the caller's thread.
        threads: Threads of all members together.
    """

    def __init__(self, count: int, *, threads: int) -> None:
        self.count = count
        each = max(1, threads // count)
        self._pools = [
            ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(each,))
            for _ in range(count if count > 1 else 0)
        ]
        self._failed = threading.Event()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.shutdown()

    def run(self, work: Callable[[int], _R]) -> list[_R]:
        """Call ``work`` with the number of each member; return the results in this order once all have ended.

        An error of a member is raised when the others have ended, which they do before their next item (:meth:`share`).
        """
        if not self._pools:
            return [work(0)]
        self._failed.clear()

        def run_member(member: int) -> _R:
            try:
                return work(member)
            except BaseException:
                self._failed.set()
                raise

        futures = [pool.submit(run_member, member) for member, pool in enumerate(self._pools)]
        wait(futures)
        return [future.result() for future in futures]

    @property
    def has_failed(self) -> bool:
        """Whether the work of a member has failed, so that the others end."""
        return self._failed.is_set()

    def share(self, member: int, items: Sequence[_T]) -> Iterator[_T]:
        """Yield the items of a member: each takes every ``count``-th one."""
        for item in items[member :: self.count]:
            if self.has_failed:
                return
            yield item

    def map(self, work: Callable[[int, _T], _R], items: Sequence[_T]) -> list[_R]:
        """Call ``work`` with a member's number and each of its items; return the results in the order of the items."""
        if len(items) == 1:  # in the caller's thread, whose products all threads share
            return [work(0, items[0])]
        shares = self.run(lambda member: [work(member, item) for item in self.share(member, items)])
        return [shares[place % self.count][place // self.count] for place in range(len(items))]
