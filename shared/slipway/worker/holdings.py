"""The artifacts on a worker's machine, which it reports so that tasks come to their inputs."""

from __future__ import annotations

import asyncio
import contextlib
import time

from slipway.artifacts.digests import abridged
from slipway.execution.runner import TaskRunner
from slipway.rpc.messages import MOST_HELD
from slipway_protos.v1 import worker_pb2

_LOOK_SECONDS = 5.0
_REPEAT_SECONDS = 60.0
"""How often they are reported although they are the same: a coordinator may have forgotten them."""


class Holdings:
    """What this worker's cache has, and what of it the coordinator knows.

    Args:
        runner: Its store may have a cache; without one nothing is ever reported.
    """

    def __init__(self, runner: TaskRunner) -> None:
        self._cache = runner.cache
        self._whole = frozenset[str]()
        self._present: tuple[int, ...] = ()
        self._told: tuple[int, ...] | None = None
        self._told_at = 0.0

    def look(self) -> None:
        """Look at the cache; blocks. What is only partly there, such as what is arriving, does not count."""
        if self._cache is None:
            return
        with contextlib.suppress(OSError):  # a task that needs the cache will report it
            recent = self._cache.recent(MOST_HELD)
            # Files of an artifact stay for as long as its manifest does, so each is looked through once.
            self._whole = frozenset(one for one in recent if one in self._whole or self._cache.exists(one))
            self._present = tuple(abridged(digest) for digest in recent if digest in self._whole)

    async def keep_looking(self) -> None:
        """Look again and again, because other workers of this machine fill and empty the cache too."""
        while self._cache is not None:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(self.look)

    def message(self) -> worker_pb2.HeldArtifacts | None:
        """Return what to report now; None if the coordinator knows it, or without a cache."""
        known = self._told == self._present and time.monotonic() - self._told_at < _REPEAT_SECONDS
        return None if self._cache is None or known else worker_pb2.HeldArtifacts(artifacts=self._present)

    def note_answered(self, request: worker_pb2.SynchronizeRequest) -> None:
        """Note that a report has arrived."""
        if request.HasField("held"):
            self._told, self._told_at = tuple(request.held.artifacts), time.monotonic()

    def note_lost(self) -> None:
        """Report everything with the next call: this one may not have arrived, or the next may go to another coordinator."""
        self._told = None
