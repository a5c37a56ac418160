"""Work on the pieces of weights in threads, and write every byte of a piece."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from slipway_quantize.report import Outcome

Squares = tuple[float, float]
"""Sums of squares of a piece: of its rounding error, and of its weights."""

PIECE_WEIGHTS = 1 << 20
"""Weights that are worked on at once, 4 MiB in float32: small beside any real tensor, large beside the cost of a call."""


class Pieces:
    """Pieces of weights that threads round and write; leaving the context waits for all of them.

    Their sums are added in the order of the pieces, so the outcome does not depend on the threads.

    Args:
        outcome: Receives the sums.
        threads: Number of threads.
        each: Receives those of each piece instead, to be added elsewhere in the order of all pieces.
    """

    def __init__(self, outcome: Outcome, *, threads: int, each: list[Squares] | None = None) -> None:
        self._outcome, self._each = outcome, each
        self._most = 2 * threads
        self._pool = ThreadPoolExecutor(threads)
        self._waiting: deque[Future[Squares]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        try:
            while self._waiting and kind is None:
                self._take()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def add(self, work: Callable[[], Squares]) -> None:
        """Let a thread do the work of one piece. Wait for the oldest piece if many are under way.

        Raises:
            QuantizationError: What an earlier piece raised.
        """
        while len(self._waiting) >= self._most:
            self._take()
        self._waiting.append(self._pool.submit(work))

    def _take(self) -> None:
        error, energy = self._waiting.popleft().result()
        if self._each is not None:
            self._each += [(error, energy)] if error or energy else []  # zeros change no sum
            return
        self._outcome.error_energy += error
        self._outcome.weight_energy += energy


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write every byte at ``offset``; a plain ``pwrite`` may write less.

    Raises:
        OSError: For example ENOSPC.
    """
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
