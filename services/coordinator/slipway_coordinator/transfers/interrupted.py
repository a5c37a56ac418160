"""Uploads that broke off, kept for a while so that their clients can go on where they ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from slipway.artifacts.blobs import BlobWriter

Key = tuple[str, str, str]
"""Principal, project and digest: nobody goes on with, or learns of, what another principal began."""

_SECONDS = 300.0
_MOST, _EACH = 16, 4


class InterruptedUploads:
    """Writers that wait for the rest of their content. All methods run on one event loop.

    Each holds at most one part of an upload in memory, as when it is written. The one that waits longest makes room for the next.

    Args:
        discard: Removes what a writer has written.
        seconds: How long each is kept.
        most: How many are kept, in all.
        each: How many of one principal.
    """

    def __init__(
        self,
        discard: Callable[[BlobWriter], Awaitable[None]],
        *,
        seconds: float = _SECONDS,
        most: int = _MOST,
        each: int = _EACH,
    ) -> None:
        self._discard, self._seconds, self._most, self._each = discard, seconds, most, each
        self._kept: dict[Key, tuple[BlobWriter, asyncio.TimerHandle]] = {}
        self._discarding: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, writer: BlobWriter) -> None:
        """Keep a writer, in place of one of the same key."""
        self.drop(key)
        of_principal = [other for other in self._kept if other[0] == key[0]]
        if len(of_principal) >= self._each:
            self.drop(of_principal[0])
        elif len(self._kept) >= self._most:
            self.drop(next(iter(self._kept)))
        timer = asyncio.get_running_loop().call_later(self._seconds, self.drop, key)
        self._kept[key] = writer, timer

    def position(self, key: Key) -> int:
        """Return how many bytes are kept under a key, 0 for none."""
        kept = self._kept.get(key)
        return 0 if kept is None else kept[0].position or 0

    def take(self, key: Key, *, offset: int, size_bytes: int) -> BlobWriter | None:
        """Return the writer of a key, which the caller then owns; None, and it stays, if it ended elsewhere or has another size."""
        writer, _ = self._kept.get(key, (None, None))
        if writer is None or (writer.position, writer.file.size_bytes) != (offset, size_bytes):
            return None
        return self._forget(key)

    def drop(self, key: Key) -> None:
        """Discard the writer of a key, if there is one."""
        writer = self._forget(key)
        if writer is not None:
            task: asyncio.Future[None] = asyncio.ensure_future(self._discard(writer))
            self._discarding.add(task)
            task.add_done_callback(self._discarding.discard)

    async def close(self) -> None:
        """Discard all."""
        for key in list(self._kept):
            self.drop(key)
        await asyncio.gather(*self._discarding, return_exceptions=True)

    def _forget(self, key: Key) -> BlobWriter | None:
        writer, timer = self._kept.pop(key, (None, None))
        if timer is not None:
            timer.cancel()
        return writer
