"""Sources that a worker imports: only from a bucket, the hub or the store, and only from allowed addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

from slipway.artifacts import Artifacts
from slipway.artifacts.blobs import Blobs
from slipway.artifacts.store import OnBytes
from slipway.errors import ArtifactError
from slipway.settings import Settings
from slipway.sources.allowed import is_url
from slipway.sources.folders import SourceFolders
from slipway.sources.hub import SCHEME as HUB
from slipway.sources.origins import ArtifactOrigin

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
