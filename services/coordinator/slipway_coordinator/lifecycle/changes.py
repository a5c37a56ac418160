"""Changes of exports as watchers of whole projects receive them: creations, changes of state, deletions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from slipway_coordinator.lifecycle.records import ExportRecord, ExportState

IN_MEMORY, IN_MEMORY_SIZE = 1000, 16 << 20
"""How many changes are kept in memory for watchers, and their characters together."""


class ChangeKind(StrEnum):
    """What happened to an export."""

    CREATED = "created"
    STATE_CHANGED = "state_changed"
    DELETED = "deleted"


class ExportChange(BaseModel):
    """One change, with as much of the export as watchers receive.

    Attributes:
        kind: What happened.
        export: The export after it, before a deletion; without configuration, sources, tasks and warnings.
        outputs: Its delivered artifacts by format.
        previous: State before the change; None at a creation.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: ChangeKind
    export: ExportRecord
    outputs: Mapping[str, str] = Field(default_factory=dict)
    previous: ExportState | None = None

    @classmethod
    def of(cls, kind: ChangeKind, record: ExportRecord, *, previous: ExportState | None = None) -> Self:
        """Return a change of an export."""
        short = record.with_(configuration={}, sources={}, tasks=(), warnings=(), request_hash="", request_id="")
        return cls(kind=kind, export=short, outputs=record.outputs, previous=previous)
