"""What a command has in hand before it creates an export: sources in the store, or only their addresses."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slipway.artifacts import Artifacts
from slipway.configuration import ExportConfiguration
from slipway.embedded.identity import export_identity
from slipway.export_sources.brought import find_brought
from slipway.export_sources.found import Sources, store_files, store_sources
from slipway.export_sources.titles import title
from slipway.sources import SourceFolders

OnBytes = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Prepared:
    """An export that is about to be created.

    Attributes:
        identity: Its id, empty where the coordinator chooses it: the same sources and settings are the same export, but what is found
            under an address may be something else the next time.
        request_id: Tells requests apart that only name sources; empty where the identity does.
        digests: Sources that were brought, by name.
        labels: Names of the sources for people, as far as they are known here.
        formats: How sources are stored that have to be prepared first.
        title: What is exported, for people; empty while unknown.
        warnings: What was odd.
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
    digests = store_sources(sources, store, on_bytes=on_bytes)
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
    """Put into the store what workers cannot import, and leave the rest to them."""
    found = find_brought(configuration, folders, imports)
    digests = store_files(found.files, folders, store, on_bytes=on_bytes)
    return Prepared("", request_id or uuid.uuid4().hex, digests, found.labels, {}, title(found.labels), found.warnings)
