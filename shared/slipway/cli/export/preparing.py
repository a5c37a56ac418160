"""Prepare an export: put its sources into the store, or leave their addresses to a worker, and compute its id.

The same configuration, sources and tools give the same id, so the same command resumes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipway.artifacts import Artifacts
from slipway.base_match import BaseMatch
from slipway.cli.progress.display import Display
from slipway.configuration import ExportConfiguration, LoadedConfiguration
from slipway.distribution import own_version
from slipway.errors import ConfigurationError
from slipway.export_sources.discovery import Sources, find_sources
from slipway.export_sources.naming import title
from slipway.export_sources.uploads import find_uploads
from slipway.registry import load_stage, stage_names
from slipway.sources import SourceFolders
from slipway.sources.folders import describe_reading, store_files

_log = logging.getLogger("slipway.export")


@dataclass(frozen=True)
class Prepared:
    """An export that is about to be created.

    Attributes:
        identity: Its id; empty if the coordinator chooses it. The same sources and settings are the same export, but the content at an
            address may change.
        request_id: Name that distinguishes requests with addresses of sources; empty if ``identity`` does.
        digests: Digests of the sources in the store, by name.
        labels: Readable names of the sources, as far as they are known here.
        formats: Storage formats of the sources that must be prepared first.
        warnings: Warnings about the sources.
    """

    identity: str
    request_id: str
    digests: Mapping[str, str]
    labels: Mapping[str, str]
    formats: Mapping[str, str]
    warnings: tuple[str, ...]


def prepare_sources(
    loaded: LoadedConfiguration,
    folders: SourceFolders,
    store: Artifacts,
    display: Display,
    *,
    imports: Mapping[str, str],
    request_id: str,
    check: Callable[[Sources], Sequence[str]] = lambda _: (),
) -> Prepared:
    """Put the sources into the store, except those that a worker will import; show their title and log the warnings.

    Args:
        loaded: The configuration with its warnings.
        folders: Places of the sources.
        store: Store that receives them.
        display: Display of the progress.
        imports: Addresses of the sources that a worker imports, by name.
        request_id: Name of the request; chosen here if it is needed and empty.
        check: Function that returns further warnings about sources that are all here.
    """

    def on_bytes(name: str, done: int, total: int) -> None:
        display.note(describe_reading(name, done, total))

    def announce(heading: str, warnings: Sequence[str]) -> None:
        if heading:
            display.title(heading)
        for warning in dict.fromkeys((*loaded.warnings, *warnings)):
            _log.warning(warning)

    configuration = loaded.configuration
    if imports:
        uploads = find_uploads(configuration, folders, imports)
        announce(title(uploads.labels), uploads.warnings)
        digests = store_files(uploads.files, folders, store, on_bytes=on_bytes)
        return Prepared("", request_id or uuid.uuid4().hex, digests, uploads.labels, {}, uploads.warnings)
    sources = find_sources(configuration, folders, origins=loaded.origins)
    warnings = (*sources.warnings, *check(sources))
    announce(sources.title, warnings)
    digests = store_files(sources.files(), sources.folders, store, on_bytes=on_bytes)
    identity = export_identity(configuration, digests, base_match=sources.base_match)
    return Prepared(identity, request_id, digests, sources.labels(), sources.formats, warnings)


def export_identity(
    configuration: ExportConfiguration, digests: Mapping[str, str], *, base_match: BaseMatch | None
) -> str:
    """Return a 20-character id for these sources, this configuration and the installed software.

    The verdict of the files on the base model is part of it: if that changes, the export is another one, with the same stored
    results. Log settings are not part of it. Library versions are, because another version may give other results.
    """
    document = {
        "configuration": configuration.model_dump(mode="json", exclude={"log"}),
        "sources": dict(sorted(digests.items())),
        "base_match": base_match.status.value if base_match else "",
        "software": {"slipway": own_version(), **_stage_versions()},
    }
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"e-{hashlib.sha256(canonical.encode()).hexdigest()[:18]}"


def _stage_versions() -> dict[str, Any]:
    stages: dict[str, Any] = {}
    for name in stage_names():
        try:
            stage = load_stage(name)
        except ConfigurationError:  # its extra is not installed; an export that needs it reports that
            continue
        stages[name] = [stage.version, stage.library_versions(), [str(provider) for provider in stage.providers()]]
    return stages
