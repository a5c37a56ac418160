"""``import``: copy sources that a client only named from a bucket or the hub into the artifact store.

It runs in a child process with a stage's progress, limits and failures, but it is part of the worker and cannot be a plug-in: it
alone gets the worker's environment with the credentials, and it uses the store and the network itself. Its result is the fact
``digests``; it has no output folders.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from slipway.artifacts.opening import blobs_of, open_store
from slipway.artifacts.store import ArtifactStore
from slipway.configuration import ExportConfiguration
from slipway.errors import ArtifactError, ConfigurationError
from slipway.export_sources.discovery import find_sources
from slipway.export_sources.storing import add_up
from slipway.planning.references import by_source_name
from slipway.registry import IMPORT
from slipway.settings import Settings
from slipway.sources.allowed import Allowed
from slipway.sources.importing import ImportFolders
from slipway.stage import Context, Stage, StageParams


class Pin(BaseModel):
    """A source at its first import: the address of exactly that content, and its digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    digest: str


class ImportParams(StageParams):
    """Parameters of an import.

    Attributes:
        sources: The sections of the configuration that name sources; uploaded sources are named by digest.
        imports: Addresses by source name; an empty base address means the base that the adapter names.
        pinned: Sources that this task has imported before.
        brought: Digests of the uploaded sources; the worker sets it, so that no other artifact can be read.
        project: Project of the export; the worker sets it.
    """

    sources: dict[str, Any]
    imports: dict[str, str]
    pinned: dict[str, Pin] = Field(default_factory=dict)
    brought: list[str] = Field(default_factory=list)
    project: str = ""


def run(inputs: Mapping[str, Path], params: ImportParams, ctx: Context) -> dict[str, Path]:  # noqa: ARG001 - named by digest
    """Import with the settings of this process.

    Raises:
        ArtifactError: ``SOURCE_NOT_ALLOWED``, ``SOURCE_NOT_FOUND``, ``LIMIT_EXCEEDED``, and errors of store and origins.
        CheckpointValidationError: A source is unusable, or base and adapter do not belong together.
    """
    settings = Settings.from_environment(os.environ).model_copy(update={"scratch": ctx.workdir})
    import_sources(params, settings, open_store(settings), ctx)
    return {}


def import_sources(params: ImportParams, settings: Settings, store: ArtifactStore, ctx: Context) -> None:
    """Find the sources, check them together, store those to be imported, and record their digests and names."""
    permit = partial(Allowed.parse(settings.import_from).check, project=params.project)
    configuration = _configuration(params)
    ctx.progress("looking at sources", done=0)
    with ImportFolders(
        settings, store, blobs_of(store), given=frozenset(params.brought), permit=permit, on_wait=ctx.check_cancelled
    ) as folders:
        sources = find_sources(configuration, folders, here=False)
        every = sources.files()
        files = {name: every[name] for name in sorted(params.imports)}
        sizes = {name: sum(path.stat().st_size for path in each.values()) for name, each in files.items()}
        if sum(sizes.values()) > settings.import_bytes:
            raise ArtifactError(
                f"the sources have {sum(sizes.values())} bytes, {settings.import_bytes} are allowed",
                reason="LIMIT_EXCEEDED",
                remedy="raise SLIPWAY_IMPORT_SIZE of the workers",
            )
        digests = {
            name: folders.put(each, store, on_bytes=add_up(partial(_progress, ctx, name), sizes[name]))
            for name, each in files.items()
        }
        urls = {name: folders.pinned(_folder(each)) for name, each in files.items()}
        ctx.record(
            digests=digests,
            urls=urls,
            labels=sources.labels(),
            source_formats=dict(sources.formats),
            imported_bytes=sum(sizes.values()),
            read_bytes=folders.read_bytes,
        )
    for warning in sources.warnings:
        ctx.warn(warning)


def _configuration(params: ImportParams) -> ExportConfiguration:
    """Return the configuration of the sources; those imported before have their pinned address."""
    sections = {name: dict(section) for name, section in params.sources.items()}
    pinned = {name: pin.url for name, pin in params.pinned.items() if pin.url}
    try:
        sections["base_model"]["name"] = pinned.get("base", sections["base_model"]["name"])
        sections["checkpoint"]["path"] = pinned.get("adapter", sections["checkpoint"]["path"])
        adapters = sections["combination"]["adapters"]
        sections["combination"]["adapters"] = [
            pinned.get(name, path) for name, path in by_source_name(adapters).items()
        ]
        return ExportConfiguration.model_validate(sections)
    except (KeyError, TypeError, pydantic.ValidationError) as error:
        raise ConfigurationError(
            f"the import's parameters name no usable sources: {str(error).splitlines()[0]}", reason="PARAMS_INVALID"
        ) from error


def _folder(files: Mapping[str, Path]) -> Path:
    """Return the folder that the files' names are relative to."""
    name, path = next(iter(files.items()))
    return path.parents[name.count("/")]


def _progress(ctx: Context, name: str, done: int, total: int) -> None:
    ctx.progress(f"importing {name}", done=done, total=total)


STAGE = Stage(name=IMPORT, version=1, inputs=(), outputs=(), params=ImportParams, run=run, more_inputs=True)
