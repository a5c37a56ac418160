"""Plans of new exports, kept for those that follow: exports of a batch have one configuration, and differ in their sources."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slipway.configuration import ExportConfiguration
from slipway.export_sources.naming import sources_to_import
from slipway.planning.plan import plan
from slipway.rpc.messages import configuration_of
from slipway_coordinator.lifecycle.records import TaskRecord
from slipway_protos.v1 import configuration_pb2

_PUBLISHING = frozenset({"destinations", "license"})
_KEPT = 64
_LONGEST_KEPT = 16 << 10
"""Bytes of a configuration whose plan is kept."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What follows from a request without its digests. Exports share it, so nothing in it is ever changed.

    Attributes:
        configuration: The configuration.
        recorded: The same as JSON-ready data.
        chosen: What of it the client set, without the places where a client publishes the result.
        imports: Addresses of the sources that a worker imports, by name.
        tasks: The tasks; those after an import are planned again when it has succeeded.
        needs_gpu: Whether one of them needs or prefers a worker with a GPU.
    """

    configuration: ExportConfiguration
    recorded: dict[str, Any]
    chosen: dict[str, Any]
    imports: Mapping[str, str]
    tasks: tuple[TaskRecord, ...]
    needs_gpu: bool


def chosen_settings(configuration: ExportConfiguration) -> dict[str, Any]:
    """Return what a client set that affects the result, so that a default may change between two calls of one request."""
    chosen = configuration.model_dump(mode="json", exclude_unset=True)
    if set(chosen.get("output", ())) & _PUBLISHING:
        output = {name: value for name, value in chosen.pop("output").items() if name not in _PUBLISHING}
        chosen |= {"output": output} if output else {}
    return chosen


class Plans:
    """Plans the exports of one coordinator. Used on one event loop."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Planned] = {}  # the longest unused first

    def of(
        self,
        message: configuration_pb2.ExportConfiguration,
        sources: Collection[str],
        *,
        formats: Mapping[str, str],
        weight_bytes: int = 0,
    ) -> Planned:
        """Plan an export.

        Args:
            message: Its configuration.
            sources: Names of the sources that are artifacts.
            formats: Storage formats of sources, by name.
            weight_bytes: Size of the base's weights; 0 while unknown.

        Raises:
            ModelExportError: reason ``CONFIGURATION_INVALID`` or ``REQUEST_INVALID``.
        """
        content = message.SerializeToString(deterministic=True)
        if len(content) > _LONGEST_KEPT:
            return _planned(message, sources, formats, weight_bytes)
        key = (content, tuple(sorted(sources)), tuple(sorted(formats.items())), weight_bytes)
        planned = self._kept.pop(key, None) or _planned(message, sources, formats, weight_bytes)
        self._kept[key] = planned
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return planned


def _planned(
    message: configuration_pb2.ExportConfiguration,
    sources: Collection[str],
    formats: Mapping[str, str],
    weight_bytes: int,
) -> Planned:
    configuration = configuration_of(message)
    imports = sources_to_import(configuration, sources)
    tasks = plan(configuration, {*sources, *imports}, source_formats=formats, weight_bytes=weight_bytes)
    return Planned(
        configuration=configuration,
        recorded=configuration.model_dump(mode="json"),
        chosen=chosen_settings(configuration),
        imports=imports,
        tasks=tuple(TaskRecord.from_plan(task) for task in tasks),
        needs_gpu=any(task.requirements.uses_gpu for task in tasks),
    )
