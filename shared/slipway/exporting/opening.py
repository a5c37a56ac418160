"""Open the artifacts that an export uses: a coordinator's, or those of a store that this machine accesses itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from slipway.artifacts import Artifacts
from slipway.artifacts.opening import open_store
from slipway.settings import Settings


@contextlib.contextmanager
def artifacts_at(coordinator: str, settings: Settings) -> Iterator[Artifacts]:
    """Use the coordinator's artifacts unless a store is configured; without a coordinator, use the store.

    Artifacts that are stored or fetched are not collected before the context ends.
    """
    if coordinator and not settings.store:
        from slipway.client.artifacts import ProjectArtifacts
        from slipway.client.calls import BlockingCalls

        with BlockingCalls(coordinator, security=settings.security) as calls:
            yield ProjectArtifacts(calls, settings.project)
    else:
        store = open_store(settings)
        with store.using():
            yield store
