"""The size of the weights of an export's base, by which a plan divides large work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slipway.artifacts.blobs import Blobs
from slipway.artifacts.faults import ABSENT
from slipway.errors import ArtifactError
from slipway.planning.division import weight_bytes
from slipway.registry import IMPORT
from slipway_coordinator.lifecycle.records import ExportRecord


async def base_weight_bytes(record: ExportRecord, open_blobs: Callable[[], Blobs]) -> int:
    """Return the size of a new export's base, if its settings divide work; 0 otherwise, and for a base that must be imported.

    Args:
        record: The export, planned without it.
        open_blobs: Opens the artifact store.

    Raises:
        ArtifactError: The store does not answer.
    """
    divides = record.configuration.get("execution", {}).get("split_bytes")
    if (
        not divides or "base" not in record.sources or record.tasks[0].stage == IMPORT
    ):  # an import finds the size itself
        return 0
    try:
        manifest = await asyncio.to_thread(lambda: open_blobs().manifest(record.sources["base"]))
    except ArtifactError as error:
        if error.reason not in ABSENT:
            raise
        return 0  # the first task that fetches it says so
    return weight_bytes({file.path: file.size_bytes for file in manifest.files})
