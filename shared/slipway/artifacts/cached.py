"""A remote store with a cache on this node. The remote store is authoritative."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from slipway.artifacts.collection import Collected, collect
from slipway.artifacts.faults import ABSENT, disk_full
from slipway.artifacts.files import in_threads, regular_files
from slipway.artifacts.local import LocalStore
from slipway.artifacts.manifest import Manifest, ManifestFile
from slipway.artifacts.s3.store import S3Store
from slipway.artifacts.s3.transfer import workers
from slipway.artifacts.store import NOTHING_KNOWN, Known, OnBytes
from slipway.errors import ArtifactError
from slipway.files.paths import open_real, open_unlinked
from slipway.files.regular_file import open_lock
from slipway.files.work_folders import is_at
from slipway.observability import metrics

_TRIES = 3


class CachedStore:
    """An :class:`~slipway.artifacts.store.ArtifactStore` that fetches each blob once per node, for several processes at once.

    Args:
        remote: The store with everything.
        local: The cache; fetched files are hard links into it.
        max_bytes: Above this size the least recently used artifacts are evicted; links of running tasks keep their content. They are
            evicted earlier if the file system lacks room for an incoming artifact and an output of the same size.
    """

    def __init__(self, remote: S3Store, local: LocalStore, *, max_bytes: int | None = None) -> None:
        self.remote, self.local = remote, local
        # Other nodes cannot use this node's cache, so only the remote store says what exists.
        self.where, self.exists, self.digests, self.last_used = (
            remote.where,
            remote.exists,
            remote.digests,
            remote.last_used,
        )
        self.action, self.record_action, self.results = remote.action, remote.record_action, remote.results
        self.size_bytes = remote.size_bytes
        self._max_bytes = max_bytes
        self._arriving = local.root / "arriving"
        self._arriving.mkdir(exist_ok=True)
        self._remove_abandoned()

    def put(
        self,
        folder: Path,
        *,
        known: Known = NOTHING_KNOWN,
        adopted: Collection[ManifestFile] = (),
        on_bytes: OnBytes | None = None,
    ) -> str:
        """Commit a folder that the caller gives up to both stores; with adopted files, which the cache may lack, only to the remote one."""
        if adopted:
            return self.remote.put(folder, known=known, adopted=adopted, on_bytes=on_bytes)
        digest = self.local.put(folder, known=known, on_bytes=on_bytes)
        files = dict(regular_files(folder))
        return self._send(
            digest,
            lambda name: open_unlinked(files[name]),
            lambda: self.remote.put(folder, on_bytes=on_bytes),
            on_bytes,
        )

    def put_files(self, files: Mapping[str, Path], *, on_bytes: OnBytes | None = None) -> str:
        """Commit files that stay their owner's to both stores."""
        digest = self.local.put_files(files, on_bytes=on_bytes)
        return self._send(
            digest,
            lambda name: open_real(files[name]),
            lambda: self.remote.put_files(files, on_bytes=on_bytes),
            on_bytes,
        )

    def fetch(
        self, digest: str, target: Path, *, leave_out: Collection[str] = (), on_bytes: OnBytes | None = None
    ) -> Path:
        """Write an artifact's verified files below ``target``.

        Raises:
            ArtifactError: As :meth:`S3Store.fetch`.
        """
        for _ in range(_TRIES):
            self._bring(digest, leave_out, on_bytes)
            try:
                self.local.fetch(digest, target, leave_out=leave_out, on_bytes=on_bytes)
            except ArtifactError as error:  # evicted meanwhile, or damaged on this disk
                if error.reason not in ABSENT:
                    raise
                with contextlib.suppress(FileNotFoundError):
                    target.rmdir()
                continue
            self._evict()
            return target
        return self.remote.fetch(digest, target, leave_out=leave_out, on_bytes=on_bytes)

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of an artifact."""
        try:
            return self.local.manifest(digest)
        except ArtifactError as error:
            if error.reason not in ABSENT:
                raise
            return self.remote.manifest(digest)

    def using(self) -> contextlib.AbstractContextManager[None]:
        """Mark that work is running; see :mod:`slipway.artifacts.s3.store`."""
        return self.remote.using()

    def under_way(self) -> frozenset[str]:
        """Return no digests: a collection of the bucket reads the marks itself."""
        return frozenset()

    def _send(
        self,
        digest: str,
        open_source: Callable[[str], BinaryIO],
        put_sources: Callable[[], str],
        on_bytes: OnBytes | None,
    ) -> str:
        def open_from(file: ManifestFile) -> BinaryIO:
            """Open a file in the cache or, if another process has evicted it, at its source."""
            with contextlib.suppress(FileNotFoundError):
                return open_unlinked(self.local.blob_path(file.digest))
            return open_source(file.path)

        try:
            manifest = self.local.manifest(digest)
        except ArtifactError as error:
            if error.reason not in ABSENT:
                raise
            return put_sources()
        self.remote.put_blobs(manifest, open_from, on_bytes=on_bytes)
        self._evict()
        return digest

    def _bring(self, digest: str, leave_out: Collection[str], on_bytes: OnBytes | None) -> None:
        """Fetch an artifact's missing blobs into the cache; one process fetches a blob, others wait for it."""
        if manifest := self.local.whole(digest):
            files = manifest.without(leave_out)
            for file in files:
                _count(file, "hit")
            self._make_room(_size(files), keep=digest)
            return
        manifest = self.remote.during(on_bytes).manifest(digest)
        files = manifest.without(leave_out)
        missing = [file for file in files if not self.local.has_blob(file)]
        self._make_room(_size(missing) + _size(files), keep=digest)
        # First, because an eviction for another artifact removes blobs that no manifest names.
        self.local.admit(manifest)
        with disk_full("fetching", digest, at=self.local.root), workers() as pool:

            def bring(file: ManifestFile, count: OnBytes) -> None:
                with self._lock_blob(file.digest) as arriving:
                    if self.local.has_blob(file):
                        _count(file, "hit")
                        return
                    _count(file, "miss")
                    arriving.unlink(missing_ok=True)  # left by a process that was killed
                    try:
                        remote = self.remote.during(count)
                        remote.fetch_blob(file, digest, arriving, pool=pool, on_bytes=count)
                        self.local.admit_blob(file, arriving)
                    finally:
                        arriving.unlink(missing_ok=True)

            in_threads(bring, files, on_bytes)

    @contextlib.contextmanager
    def _lock_blob(self, digest: str) -> Iterator[Path]:
        """Lock a blob against other processes; yield the path to write it to."""
        part = self._arriving / f"{digest.removeprefix('sha256:')}.part"
        path = part.with_suffix(".lock")
        while True:
            with open_lock(path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not is_at(lock.fileno(), path):  # the former holder removed the lock file
                    continue
                try:
                    yield part
                finally:
                    path.unlink(missing_ok=True)
                return

    def _remove_abandoned(self) -> None:
        """Remove incoming files left by killed processes; files being written are locked."""
        for path in sorted({path.with_suffix(".lock") for path in self._arriving.iterdir()}):
            with contextlib.suppress(OSError), open_lock(path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(lock.fileno(), path):
                    path.with_suffix(".part").unlink(missing_ok=True)
                    path.unlink()
        with contextlib.suppress(OSError), self.local.lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in (self.local.root / "uploads").iterdir():
                path.unlink(missing_ok=True)

    def _evict(self) -> None:
        if self._max_bytes is not None and self.local.size_bytes() > self._max_bytes:
            self._shrink(self._max_bytes)

    def _make_room(self, needed_bytes: int, *, keep: str) -> None:
        """Evict until this many bytes are free; callers count an artifact twice, as a task's output is about as large as its input."""
        free = shutil.disk_usage(self.local.root).free
        while (lacking := needed_bytes - free) > 0:
            size = self.local.size_bytes()
            if lacking > size:
                return  # other files fill the disk: evicting everything would not help
            self._shrink(size - lacking, keep=(keep,))
            before, free = free, shutil.disk_usage(self.local.root).free
            if free - before < lacking // 2:
                return  # the evicted files have links elsewhere, or there was nothing left to evict

    def _shrink(self, max_bytes: int, *, keep: Collection[str] = ()) -> Collected:
        gone = collect(self.local, max_bytes=max_bytes, keep=lambda: keep)
        metrics.NODE_CACHE_EVICTIONS.add(len(gone.artifacts))
        metrics.NODE_CACHE_EVICTED_BYTES.add(gone.freed_bytes)
        return gone


def _size(files: Iterable[ManifestFile]) -> int:
    return sum(file.size_bytes for file in files)


def _count(file: ManifestFile, result: str) -> None:
    metrics.NODE_CACHE_FILES.add(result=result)
    metrics.NODE_CACHE_FILE_BYTES.add(file.size_bytes, result=result)
