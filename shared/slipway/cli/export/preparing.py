"""Prepare the sources of an export before it is created: put them into the store, or leave their addresses to a worker."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slipway.artifacts import Artifacts
from slipway.configuration import ExportConfiguration
from slipway.embedded.identity import export_identity
from slipway.export_sources.brought import find_brought
from slipway.export_sources.found import Sources, store_files
from slipway.export_sources.titles import title
from slipway.sources import SourceFolders

OnBytes = Callable[[str, int, int], None]


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
        title: Title of the export, for people; empty while unknown.
        warnings: Warnings about the sources.
    """

    identity: str
    request_id: str
    digests: Mapping[str, str]
    labels: Mapping[str, str]
    formats: Mapping[str, str]
    title: str
    warnings: tuple[str, ...]


def store_found(
    configuration: ExportConfiguration, sources: Sources, store: Artifacts, *, request_id: str, on_bytes: OnBytes
) -> Prepared:
    """Put all sources into the store."""
    digests = store_files(sources.files(), sources.folders, store, on_bytes=on_bytes)
    identity = export_identity(configuration, digests, base_match=sources.base_match)
    return Prepared(identity, request_id, digests, sources.labels(), sources.formats, sources.title, sources.warnings)


def name_sources(
    configuration: ExportConfiguration,
    imports: Mapping[str, str],
    folders: SourceFolders,
    store: Artifacts,
    *,
    request_id: str,
    on_bytes: OnBytes,
) -> Prepared:
    """Put the sources that workers cannot import into the store, and leave the others to workers."""
    found = find_brought(configuration, folders, imports)
    digests = store_files(found.files, folders, store, on_bytes=on_bytes)
    return Prepared("", request_id or uuid.uuid4().hex, digests, found.labels, {}, title(found.labels), found.warnings)
