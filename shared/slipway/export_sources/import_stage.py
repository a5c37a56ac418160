"""``import``: copy sources that a client only named from a bucket or the hub into the artifact store.

It runs in a child process with a stage's progress, limits and failures, but it is part of the worker and cannot be a plug-in: it
alone gets the worker's environment with the credentials, and it uses the store and the network itself. Its result is the fact
``digests``; it has no output folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from slipway.artifacts import Artifacts
from slipway.artifacts.blobs import Blobs
from slipway.artifacts.opening import blobs_of, open_store
from slipway.artifacts.store import ArtifactStore, OnBytes
from slipway.configuration import ExportConfiguration
from slipway.errors import ArtifactError, ConfigurationError
from slipway.export_sources.discovery import find_sources
from slipway.planning.references import by_source_name
from slipway.registry import IMPORT
from slipway.settings import Settings
from slipway.sources.addresses import HUB, Allowed, is_url
from slipway.sources.folders import SourceFolders, add_up
from slipway.sources.origins import ArtifactOrigin
from slipway.stage import Context, Stage, StageParams

if TYPE_CHECKING:
    from slipway.sources.hub_origin import HubOrigin
    from slipway.sources.mirror import Mirror


class ImportFolders(SourceFolders):
    """Folders of sources that show names, sizes and headers; files to store are fetched one by one.

    Args:
        settings: Scratch space, S3 service, hub.
        store: Target of the sources.
        blobs: The same store, file by file.
        given: Digests of the uploaded sources.
        permit: Raises for an address that must not be read.
        on_wait: Called now and then; an exception from it ends the work.
    """

    def __init__(
        self,
        settings: Settings,
        store: Artifacts,
        blobs: Blobs,
        *,
        given: Set[str],
        permit: Callable[[str], None],
        on_wait: Callable[[], None],
    ) -> None:
        super().__init__(settings, store)
        self._blobs, self._given, self._permit, self._wait = blobs, given, permit, on_wait
        self._hubs: dict[Path, HubOrigin] = {}

    def find(self, source: str) -> Path:
        """Return the folder that shows a source.

        Raises:
            ArtifactError: ``SOURCE_NOT_ALLOWED``, also for any local path: a worker's files are never a source.
            ModelExportError: Errors of the origin.
        """
        if source in self._given:
            return self._mirror(
                source, lambda: ArtifactOrigin(self._blobs, source), lambda _: Path(source.replace(":", "-")[:19])
            )
        if not is_url(source):
            raise ArtifactError(
                f"{source!r} is not a source that a worker can import",
                reason="SOURCE_NOT_ALLOWED",
                remedy="name s3://bucket/prefix or hf://owner/name@revision, or push it and name its digest",
            )
        self._permit(source)
        return self._hub(source) if source.startswith(HUB) else self._bucket(source)

    def snapshot(self, folder: Path) -> tuple[str, tuple[str, ...]]:
        """As :meth:`SourceFolders.snapshot`."""
        origin = self._hubs.get(folder)
        return ("", ()) if origin is None else (origin.repository, (origin.commit, origin.revision or "main"))

    def pinned(self, folder: Path) -> str:
        """Return the pinned address of the content of a mirrored folder or a part of it."""
        for mirror in self._mirrors.values():
            if folder.is_relative_to(mirror.folder):
                below = folder.relative_to(mirror.folder).as_posix()
                whole = below == "." or mirror.folder in self._hubs  # the hub has no addresses of folders
                return mirror.origin.pinned if whole else f"{mirror.origin.pinned}/{below}"
        return ""

    @property
    def read_bytes(self) -> int:
        """Return the bytes of the files that had to be read completely."""
        return sum(mirror.read_bytes for mirror in self._mirrors.values())

    def _hub(self, url: str) -> Path:
        from slipway.sources.hub_origin import HubOrigin

        def remember(origin: HubOrigin) -> Path:
            """Return a path like that in the library's cache, which names the repository."""
            return Path(f"models--{origin.repository.replace('/', '--')}", "snapshots", origin.commit)

        folder = self._mirror(url, lambda: HubOrigin(url, endpoint=self._settings.hub_endpoint), remember)
        origin = self._mirrors[url].origin
        assert isinstance(origin, HubOrigin)
        self._hubs[folder] = origin
        return folder

    def _put(self, mirror: Mirror, files: Mapping[str, Path], store: Artifacts, on_bytes: OnBytes) -> str:
        return mirror.bring(files, store, self._blobs, scratch=self._new(), on_bytes=on_bytes)

    def _on_wait(self) -> None:
        self._wait()


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
            weight_bytes=sources.weight_bytes,
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
