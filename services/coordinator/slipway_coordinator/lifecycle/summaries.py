"""Summaries of exports, stored beside their records: lists read them without the plans, and without checking what this program wrote.

The shape of records is stored with them too, so that a start checks only those that a program with other records wrote. Pure.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from slipway.errors import Failure
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """An export without its configuration, sources and tasks; each field is as in :class:`ExportRecord`."""

    name: str
    create_time: float
    state: ExportState = ExportState.QUEUED
    outputs: Mapping[str, str] = field(default_factory=dict)
    failure: Failure | None = None
    warnings: Sequence[str] = ()
    recovery_profile: str = ""
    traceparent: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    creator: str = ""
    revision: int = 1
    run: int = 1
    end_time: float | None = None

    @property
    def etag(self) -> str:
        """As :attr:`ExportRecord.etag`."""
        return f"{self.run}-{self.revision}"

    @classmethod
    def of(cls, record: ExportRecord) -> Self:
        """Return the summary of an export."""
        return cls(**{name: getattr(record, name) for name in _FIELDS})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the summary that :func:`summary_text` wrote; what another version added is left out.

        Raises:
            ValueError, TypeError: It is not one of this version.
        """
        values = _known(json.loads(text), _FIELDS)
        values["state"] = ExportState(values.get("state", ExportState.QUEUED))
        if values.get("failure") is not None:
            values["failure"] = Failure.from_json(_known(values["failure"], _FAILURE_FIELDS))
        return cls(**values)


_FIELDS = {each.name for each in fields(ExportSummary)}
_FAILURE_FIELDS = {each.name for each in fields(Failure)}
_RECORDED = _FIELDS - {"outputs"}


def _known(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def summary_text(record: ExportRecord) -> str:
    """Return the summary of an export as text; what has its default is left out."""
    text = record.model_dump_json(include=_RECORDED, exclude_defaults=True)
    outputs = record.outputs
    return f'{text[:-1]},"outputs":{json.dumps(outputs)}}}' if outputs else text


@functools.cache
def record_shape() -> str:
    """Return a digest of what records may have, which changes with every field, type and state that this program knows."""
    schema = json.dumps(ExportRecord.model_json_schema(mode="validation"), sort_keys=True)
    return hashlib.sha256(schema.encode()).hexdigest()[:16]
