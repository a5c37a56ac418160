"""Precedents in the artifact store, beside the action cache. All calls block."""

from __future__ import annotations

import logging
from collections.abc import Callable

from slipway.artifacts import ArtifactStore
from slipway.errors import ModelExportError
from slipway.formats.tasks import PlannedTask
from slipway.planning.precedents import Precedent

log = logging.getLogger("slipway.coordinator")


class Precedents:
    """Parameters that worked before. While the store is unavailable there are none, and exports run without them.

    Args:
        open_store: Opens the store; called at the first use. None keeps nothing.
    """

    def __init__(self, open_store: Callable[[], ArtifactStore] | None) -> None:
        self._open_store = open_store
        self._store: ArtifactStore | None = None

    def find(self, key: str, task: PlannedTask) -> Precedent | None:
        """Return the precedent for a task."""
        try:
            store = self._open_once()
            return None if store is None else Precedent.of_result(store.action(key), task)
        except (ModelExportError, OSError) as error:
            log.warning(f"what worked for such a model before cannot be read: {error}")
            return None

    def keep(self, key: str, precedent: Precedent) -> None:
        """Keep a precedent in place of an earlier one."""
        try:
            store = self._open_once()
            if store is not None:
                store.record_action(key, precedent.to_result())
        except (ModelExportError, OSError) as error:
            log.warning(f"what worked for this model cannot be kept: {error}")

    def _open_once(self) -> ArtifactStore | None:
        if self._store is None and self._open_store is not None:
            self._store = self._open_store()
        return self._store
