"""Keep up with what the API server has of one kind: a list, then the events after it, for as long as it takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from lightkube.generic_resource import GenericNamespacedResource

from slipway.engines.kubernetes.cluster import GONE, CallError, Cluster
from slipway.engines.kubernetes.states import Object

log = logging.getLogger("slipway.engine.kubernetes")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0


class Backoff:
    """Pauses between calls that fail: each twice as long as the one before, and no shorter than the server asks."""

    def __init__(self) -> None:
        self._pause = _FIRST_PAUSE

    async def wait(self, error: CallError | None = None) -> None:
        """Wait after a failed call."""
        await asyncio.sleep(max(self._pause, error.pause if error else 0.0))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def reset(self) -> None:
        """Begin anew after a call that succeeded."""
        self._pause = _FIRST_PAUSE


async def keep_on(work: Callable[[], Awaitable[None]]) -> None:
    """Do some work until cancelled: after an error that nobody foresaw, begin again."""
    backoff = Backoff()
    while True:
        try:
            await work()
        except Exception:
            log.exception("an error in the engine of Kubernetes, which goes on")
        await backoff.wait()


class Following:
    """Follows the objects of a kind with some labels.

    Args:
        cluster: The namespace.
        kind: Their kind.
        labels: Their labels.
        on_list: Takes all of them, whenever the events in between are not known. It gets what ``before`` returned before the call.
        on_event: Takes ``ADDED``, ``MODIFIED`` or ``DELETED``, and the object.
        before: Called before each list.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: type[GenericNamespacedResource],
        labels: Mapping[str, str],
        *,
        on_list: Callable[[Sequence[Object], frozenset[str]], None],
        on_event: Callable[[str, Object], None],
        before: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._cluster, self._kind, self._labels = cluster, kind, labels
        self._on_list, self._on_event, self._before = on_list, on_event, before
        self._version = ""

    async def read(self) -> None:
        """List the objects.

        Raises:
            CallError: The server does not respond, or refuses it.
        """
        before = self._before()
        things, self._version = await self._cluster.list(self._kind, self._labels)
        self._on_list(things, before)

    async def keep(self) -> None:
        """Watch until cancelled; list again when the server has forgotten the version."""
        backoff, told = Backoff(), ""
        while True:
            try:
                if not self._version:
                    await self.read()
                async for event, thing in self._cluster.watch(self._kind, self._labels, self._version):
                    self._version = str(thing["metadata"]["resourceVersion"])
                    backoff.reset()
                    told = ""
                    self._on_event(event, thing)
            except CallError as error:
                if error.code == GONE and self._version:
                    self._version = ""
                    continue
                if str(error) != told:
                    log.warning(f"{self._kind.__name__}s of {self._cluster.server} cannot be watched: {error}")
                    told = str(error)
                await backoff.wait(error)
