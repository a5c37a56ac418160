"""Show every source of an export as a local folder, and put the files of sources into the store."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from slipway.artifacts import Artifacts
from slipway.artifacts.opening import open_store
from slipway.artifacts.store import OnBytes
from slipway.distribution import require
from slipway.errors import ModelExportError
from slipway.files.paths import user_path
from slipway.settings import Settings
from slipway.settings.s3 import SCHEME, parse_s3_url
from slipway.sizes import format_size
from slipway.sources import addresses
from slipway.sources.origins import Origin

if TYPE_CHECKING:
    from slipway.sources.mirror import Mirror


_Origin = TypeVar("_Origin", bound=Origin)
_State = tuple[tuple[str, int, int, int, int], ...]


class StoredFiles:
    """The files that this process has put into one store, so that exports with the same base read it once."""

    def __init__(self) -> None:
        self._digests: dict[_State, str] = {}

    def put(self, files: Mapping[str, Path], store: Artifacts, *, on_bytes: OnBytes) -> str:
        """Store files, given by their real paths, and return the digest; do not read them again while they are the same."""
        state = _state(files)
        digest = self._digests.get(state)
        if digest is None or not store.exists(digest):
            digest = store.put_files(files, on_bytes=on_bytes)
            if _state(files) == state:  # none was changed while it was read
                self._digests[state] = digest
        return digest


def _state(files: Mapping[str, Path]) -> _State:
    """Return what changes with the content of files. The time of a change is not in it, because a link to a file in the store sets it."""
    stats = [(name, files[name].stat()) for name in sorted(files)]
    return tuple((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


class SourceFolders:
    """Folders of sources while the context lasts: local paths, ``s3://bucket/prefix``, ``sha256:…`` and ``hf://…``.

    Args:
        settings: Scratch space, S3 service and store.
        store: Store of digests, which also remembers what was found out about files; by default that of the settings, for digests alone.
        stored: Files that this process has stored before; they are not read again while they stay as they are.
    """

    def __init__(
        self, settings: Settings, store: Artifacts | None = None, *, stored: StoredFiles | None = None
    ) -> None:
        self._settings, self.store, self._stored = settings, store, stored or StoredFiles()
        self._scratch = Path(os.path.realpath(settings.scratch)) / f"sources-{uuid.uuid4().hex}"
        self._stack = ExitStack()
        self._mirrors: dict[str, Mirror] = {}
        self._names: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def find(self, source: str) -> Path:
        """Return the folder of a source. For a bucket, only configurations and headers have content.

        Raises:
            ArtifactError: ``SOURCE_NOT_FOUND``, ``ARTIFACT_NOT_FOUND``, and errors of the store.
            CheckpointValidationError: ``BASE_MODEL_NOT_FOUND``.
        """
        if source.startswith(addresses.HUB):
            return addresses.hub_folder(source)
        if source.startswith(SCHEME):
            return self._bucket(source)
        if source.startswith("sha256:"):
            folder = self._new() / f"sha256-{source.removeprefix('sha256:')[:12]}"
            self._names[str(folder)] = source
            return (self.store or open_store(self._settings)).fetch(source, folder)
        return user_path(source)

    def put(self, files: Mapping[str, Path], store: Artifacts, *, on_bytes: OnBytes) -> str:
        """Store files of a folder from :meth:`find`, given by their real paths; return the digest."""
        some = next(iter(files.values()))
        for mirror in self._mirrors.values():
            if some.is_relative_to(mirror.folder):
                return self._put(mirror, files, store, on_bytes)
        return self._stored.put(files, store, on_bytes=on_bytes)

    def snapshot(self, folder: Path) -> tuple[str, tuple[str, ...]]:  # noqa: ARG002
        """Return the hub repository that a folder was just read from, and names of its revision; empty for any other folder."""
        return "", ()

    def has_contents(self, folder: Path) -> bool:
        """Return whether the files of a folder from :meth:`find` can be read; those of a bucket cannot."""
        return not any(folder.resolve().is_relative_to(mirror.folder.resolve()) for mirror in self._mirrors.values())

    def show(self, text: str) -> str:
        """Return a text with temporary folders replaced by the names of their sources."""
        for folder, name in self._names.items():
            text = text.replace(folder, name)
        return text

    def show_all(self, document: Any) -> Any:
        """Return JSON-ready data with :meth:`show` applied to every text."""
        match document:
            case str():
                return self.show(document)
            case dict():
                return {key: self.show_all(value) for key, value in document.items()}
            case list() | tuple():
                return [self.show_all(value) for value in document]
        return document

    def name_sources(self, error: ModelExportError) -> ModelExportError:
        """Return the error with sources named as the user named them."""
        return type(error)(
            self.show(error.message),
            reason=error.reason,
            remedy=self.show(error.remedy),
            about={key: self.show(value) for key, value in error.about.items()},
            retryable=error.retryable,
        )

    def _bucket(self, url: str) -> Path:
        require("s3", what=f"reading {url}")
        from slipway.artifacts.s3.client import S3Bucket
        from slipway.sources.mirror import BucketOrigin

        name, prefix = parse_s3_url(url)
        # The folder's path ends like the address, because a run is named after its folder.
        return self._mirror(
            url, lambda: BucketOrigin(S3Bucket(self._settings.s3, name, prefix=prefix)), lambda _: Path(name, prefix)
        )

    def _mirror(self, url: str, open_origin: Callable[[], _Origin], place: Callable[[_Origin], Path]) -> Path:
        """Return the folder that mirrors an origin; the same one for the same address."""
        from slipway.sources.mirror import Mirror

        if url not in self._mirrors:
            origin = open_origin()
            mirror = Mirror(origin, self._new() / place(origin), on_wait=self._on_wait)
            self._mirrors[url] = mirror
            self._names[str(mirror.folder)] = url.rstrip("/")
        return self._mirrors[url].folder

    def _put(self, mirror: Mirror, files: Mapping[str, Path], store: Artifacts, on_bytes: OnBytes) -> str:
        return mirror.put(files, store, scratch=self._new(), on_bytes=on_bytes)

    def _on_wait(self) -> None:
        """Do nothing; called while an origin is read."""

    def _new(self) -> Path:
        """Return a new folder that is removed with the context, or after a crash by the next process, because its lock is free."""
        if not self._scratch.exists():
            self._scratch.mkdir(parents=True)
            self._stack.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            fcntl.flock(self._stack.enter_context((self._scratch / "lock").open("wb")), fcntl.LOCK_EX)
        folder = self._scratch / uuid.uuid4().hex[:8]
        folder.mkdir()
        return folder


def store_files(
    sources: Mapping[str, Mapping[str, Path]],
    folders: SourceFolders,
    store: Artifacts,
    *,
    on_bytes: Callable[[str, int, int], None],
) -> dict[str, str]:
    """Put files into the store; return the digests of the sources by name.

    Args:
        sources: Files by source and path inside the artifact.
        folders: The folders that found them.
        store: The store.
        on_bytes: Called with a source's name, the bytes read so far and its size.
    """
    digests = {}
    for name, files in sources.items():
        total = sum(path.stat().st_size for path in files.values())
        digests[name] = folders.put(files, store, on_bytes=add_up(partial(on_bytes, name), total))
    return digests


def describe_reading(name: str, done: int, total: int) -> str:
    """Describe the progress of storing a source, for people."""
    return f"reading {name}: {done / max(total, 1):.0%} of {format_size(total)}"


def add_up(report: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """Return a function that adds up byte counts and reports the sum of ``total``. Several threads may call it."""
    lock, done = threading.Lock(), 0

    def add(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            now = done
        report(min(now, total), total)

    return add
