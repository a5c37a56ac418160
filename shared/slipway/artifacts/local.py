"""The artifact store in a local folder, and marks of running work on it.

Names are those of :mod:`slipway.artifacts.digests`. Blobs are read-only files, hard-linked or cloned from their source. Beside them
are ``uploads/`` (incoming blobs), ``uses/`` (marks of running work) and ``lock`` (shared by writers, exclusive for garbage
collection). The store never touches other files in its folder.

A collection keeps what running work will still need. An export's sources have no reference before its state exists, and a task's
results have none before its end is reported. So work sets a mark before it begins: a folder that its process locks, and whose time
is the beginning of the work. Every artifact used since then may belong to it. The kernel releases the lock of a dead process, and the
next check removes its mark.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import stat
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from slipway.artifacts.adopting import require_blobs
from slipway.artifacts.digests import (
    ACTIONS,
    BLOBS,
    MANIFESTS,
    action_name,
    blob_name,
    digest_bytes,
    digest_file,
    digest_of,
    is_store_name,
    manifest_name,
)
from slipway.artifacts.faults import corrupt_error, disk_full, not_found_error, open_source
from slipway.artifacts.files import add_name, clone_or_link, in_threads, link_or_copy, regular_files
from slipway.artifacts.manifest import Manifest, ManifestFile, describe_file
from slipway.artifacts.marks import mark_work, oldest_work
from slipway.artifacts.store import NOTHING_KNOWN, ActionResult, Known, OnBytes
from slipway.errors import ArtifactError
from slipway.files.json_documents import LARGEST_LIST
from slipway.files.paths import open_real, open_unlinked
from slipway.files.regular_file import open_lock

_USES = "uses"
_Give = Callable[[BinaryIO, Path], None]
_Stat = tuple[int, int, int]  # inode, size, modification time
_VERIFIED: dict[str, dict[str, _Stat]] = {}
"""What this process has verified, by folder: a command opens its store several times, for its sources, stages and delivery."""


class LocalStore:
    """An :class:`~slipway.artifacts.store.ArtifactStore` below one folder, safe for several processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._verified = _VERIFIED.setdefault(os.path.realpath(root), {})
        for name in (BLOBS, MANIFESTS, ACTIONS, "uploads", _USES):
            (root / name).mkdir(parents=True, exist_ok=True)

    def put(
        self,
        folder: Path,
        *,
        known: Known = NOTHING_KNOWN,
        adopted: Collection[ManifestFile] = (),
        on_bytes: OnBytes | None = None,
    ) -> str:
        """Commit a folder and files whose blobs the store has; the folder's files become the store's, and read-only.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID`` for links and special files, ``DISK_FULL``; ``ARTIFACT_NOT_FOUND`` for an adopted file.
        """
        files = dict(regular_files(folder))
        for path in files.values():
            if path.stat().st_nlink == 1:  # a linked file's mode belongs to its other names too
                path.chmod(0o444)
        return self._commit(files, open_unlinked, link_or_copy, on_bytes, known=known, adopted=adopted)

    def put_files(self, files: Mapping[str, Path], *, on_bytes: OnBytes | None = None) -> str:
        """Commit files that stay their owner's: clone them, or hard-link them with their mode, or copy them.

        If the owner changes a hard-linked file later, it no longer has its digest; reading detects that.

        Args:
            files: Real paths, by their path inside the artifact.
            on_bytes: Gets the size of each chunk read.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID``, ``FILE_ERROR`` or ``DISK_FULL``; ``LINK_OUTSIDE`` for a path with a link in it.
        """
        return self._commit(files, open_real, clone_or_link, on_bytes)

    def fetch(
        self, digest: str, target: Path, *, leave_out: Collection[str] = (), on_bytes: OnBytes | None = None
    ) -> Path:
        """Create an artifact's verified files below ``target`` as hard links, or as copies where the store's file system ends.

        Files of the same content are hard links to each other there, too.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``, or ``ARTIFACT_CORRUPT`` naming the file; the corrupt blob is removed, so
                storing it again repairs the store.
        """
        files = self.manifest(digest).without(leave_out)
        with self.lock(fcntl.LOCK_SH), disk_full("fetching", digest, at=target):
            target.mkdir(parents=True)
            self._touch(digest)
            in_threads(lambda file, count: self._verify(file, digest, count), files, on_bytes)
            first: dict[str, Path] = {}
            for file in files:
                path = target / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                if file.digest in first:
                    add_name(first[file.digest], path)
                    continue
                with open_unlinked(self.blob_path(file.digest)) as blob:
                    link_or_copy(blob, path)
                first[file.digest] = path
        return target

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of an artifact.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND`` or ``ARTIFACT_CORRUPT``.
        """
        data = self.manifest_bytes(digest)
        if digest_bytes(data) != digest:
            self.manifest_path(digest).unlink(missing_ok=True)
            raise corrupt_error(digest, "its manifest")
        return Manifest.from_bytes(data)

    def manifest_bytes(self, digest: str) -> bytes:
        """Return the stored bytes of an artifact's manifest, unchecked.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``; ``ARTIFACT_INVALID`` if it is not a regular file.
        """
        try:
            with open_unlinked(self.manifest_path(digest)) as file:
                return _read_limited(file)
        except FileNotFoundError as error:
            raise not_found_error(digest) from error

    def exists(self, digest: str) -> bool:
        """Return whether the store has the manifest and every blob of an artifact, with the right sizes."""
        return self.whole(digest) is not None

    def whole(self, digest: str) -> Manifest | None:
        """Return the manifest of an artifact that :meth:`exists`, or None; as one answer, since others may evict it meanwhile."""
        try:
            manifest = self.manifest(digest)
        except ArtifactError:
            return None
        return manifest if all(map(self.has_blob, manifest.files)) else None

    def action(self, key: str) -> ActionResult | None:
        """Return the result recorded under an action key, if every output still exists; this counts as a use of the outputs.

        No collection can run between the check and the use.
        """
        with self.lock(fcntl.LOCK_SH):
            result = self.recorded_action(key)
            for digest in result.outputs.values() if result else ():
                self._touch(digest)
        return result

    def recorded_action(self, key: str) -> ActionResult | None:
        """As :meth:`action`, but without counting as a use of the outputs."""
        result = _read_result(self.root / action_name(key))
        return result if result and all(self.exists(digest) for digest in result.outputs.values()) else None

    def record_action(self, key: str, result: ActionResult) -> None:
        """Record a result under its action key."""
        with self.lock(fcntl.LOCK_SH), disk_full("recording", key, at=self.root):
            self._write(self.root / action_name(key), result.to_bytes())

    def has_blob(self, file: ManifestFile) -> bool:
        """Return whether the store has a file's blob, with the right size."""
        return _size(self.blob_path(file.digest)) == file.size_bytes

    def admit_blob(self, file: ManifestFile, path: Path) -> None:
        """Move a verified file on this file system into the store as a blob."""
        blob = self.blob_path(file.digest)
        with self.lock(fcntl.LOCK_SH):
            blob.parent.mkdir(parents=True, exist_ok=True)
            path.replace(blob)
            self._remember(file.digest)

    def admit(self, manifest: Manifest) -> None:
        """Write the manifest of an artifact whose blobs were admitted, or are about to be."""
        with self.lock(fcntl.LOCK_SH), disk_full("storing", manifest.digest, at=self.root):
            self._write(self.manifest_path(manifest.digest), manifest.to_bytes())

    def results(self) -> Iterator[ActionResult]:
        """Yield all recorded results, whether or not their outputs still exist."""
        for path in self.listing(ACTIONS):
            result = _read_result(path)
            if result is not None:
                yield result

    def using(self) -> contextlib.AbstractContextManager[None]:
        """Mark that work is running: nothing it uses is collected before the context ends."""
        return mark_work(self.root / _USES)

    def under_way(self) -> frozenset[str]:
        """Return digests of artifacts used since the oldest running work began."""
        began = oldest_work(self.root / _USES)
        if began is None:
            return frozenset()
        return frozenset(digest for digest in self.digests() if self.last_used(digest) >= began)

    @property
    def where(self) -> str:
        """Return the folder."""
        return str(self.root)

    def size_bytes(self) -> int:
        """Return the total size of all blobs."""
        return sum(max(_size(path), 0) for path in self.listing(BLOBS))

    def digests(self) -> list[str]:
        """Return the digests of all artifacts, sorted."""
        return [digest_of(path.name) for path in self.listing(MANIFESTS)]

    def listing(self, folder: str) -> list[Path]:
        """Return the store's files in one of its folders, sorted.

        Raises:
            OSError: A folder cannot be read.
        """
        paths = []
        for part in filter(os.DirEntry.is_dir, os.scandir(self.root / folder)):
            with os.scandir(part) as entries:
                paths += [Path(entry) for entry in entries if entry.is_file(follow_symlinks=False)]
        return sorted(path for path in paths if is_store_name(path.relative_to(self.root).as_posix()))

    def recent(self, most: int) -> list[str]:
        """Return the digests of the artifacts that were used last, at most so many; some files of them may be missing.

        Raises:
            OSError: A folder cannot be read.
        """
        used: list[tuple[float, str]] = []
        for path in self.listing(MANIFESTS):
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                used.append((path.stat().st_mtime, digest_of(path.name)))
        return [digest for _, digest in heapq.nlargest(most, used)]

    def last_used(self, digest: str) -> float:
        """Return when an artifact was last made, fetched or reused, in seconds since the epoch.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``.
        """
        try:
            return self.manifest_path(digest).stat().st_mtime
        except FileNotFoundError as error:
            raise not_found_error(digest) from error

    def _commit(
        self,
        files: Mapping[str, Path],
        opened: Callable[[Path], BinaryIO],
        give: _Give,
        on_bytes: OnBytes | None,
        *,
        known: Known = NOTHING_KNOWN,
        adopted: Collection[ManifestFile] = (),
    ) -> str:
        def take(item: tuple[str, Path], count: OnBytes) -> ManifestFile:
            name, path = item
            with open_source(opened, path) as file:
                return self._take(name, file, give, count, known.get(path))

        with self.lock(fcntl.LOCK_SH), disk_full("storing", ", ".join(sorted(files)[:3]), at=self.root):
            require_blobs(adopted, self.has_blob)
            manifest = Manifest.of([*in_threads(take, sorted(files.items()), on_bytes), *adopted])
            # Blobs are not synced: a blob torn by a power cut is detected by its digest and made again.
            self._write(self.manifest_path(manifest.digest), manifest.to_bytes())
            return manifest.digest

    def _take(self, name: str, file: BinaryIO, give: _Give, on_bytes: OnBytes, known: str | None) -> ManifestFile:
        """Store one open file as a blob. A digest that the caller gave is verified by the blob's first reader."""
        entry = describe_file(name, file, known=known, on_bytes=on_bytes)
        digest = entry.digest
        blob = self.blob_path(digest)
        if _size(blob) != entry.size_bytes:
            blob.parent.mkdir(parents=True, exist_ok=True)
            arriving = self.root / "uploads" / uuid.uuid4().hex
            try:
                give(file, arriving)
                arriving.replace(blob)
            finally:
                arriving.unlink(missing_ok=True)
            if known is None:
                self._remember(digest)
        return entry

    def _verify(self, file: ManifestFile, artifact: str, on_bytes: OnBytes) -> None:
        """Compare a blob with its digest, once per process while its size, time and inode stay the same."""
        blob = self.blob_path(file.digest)
        try:
            with open_unlinked(blob) as opened:
                if self._verified.get(file.digest) == _stat(os.fstat(opened.fileno())):
                    return
                digest = digest_file(opened, on_bytes=on_bytes)
        except FileNotFoundError as error:
            raise not_found_error(artifact) from error
        except ArtifactError as error:  # a link, a folder or a pipe, which the store has not written
            if error.reason != "ARTIFACT_INVALID":
                raise
            digest = ""
        if digest != file.digest:
            self.drop_blob(file.digest)
            raise corrupt_error(artifact, file.path)
        self._remember(file.digest)

    def drop_blob(self, digest: str) -> None:
        """Remove a blob that does not have its digest."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            self.blob_path(digest).unlink()

    def _remember(self, digest: str) -> None:
        self._verified[digest] = _stat(self.blob_path(digest).lstat())

    def _touch(self, digest: str) -> None:
        with contextlib.suppress(OSError):  # the store may be read-only
            os.utime(self.manifest_path(digest))

    def _write(self, path: Path, data: bytes) -> None:
        """Write a small file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        arriving = self.root / "uploads" / uuid.uuid4().hex
        try:
            with arriving.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            arriving.replace(path)
        finally:
            arriving.unlink(missing_ok=True)

    def blob_path(self, digest: str) -> Path:
        """Return the path of a blob, whether or not it exists."""
        return self.root / blob_name(digest)

    def manifest_path(self, digest: str) -> Path:
        """Return the path of an artifact's manifest, whether or not it exists."""
        return self.root / manifest_name(digest)

    @contextlib.contextmanager
    def lock(self, kind: int) -> Iterator[None]:
        """Hold the store's lock, shared or exclusive. A lock belongs to its open file, so threads do not share one."""
        with open_lock(self.root / "lock") as file:
            fcntl.flock(file, kind)
            yield


def _read_limited(file: BinaryIO) -> bytes:
    data = file.read(LARGEST_LIST + 1)
    if len(data) > LARGEST_LIST:
        raise ArtifactError(f"{file.name} has more than {LARGEST_LIST} bytes", reason="ARTIFACT_INVALID")
    return data


def _read_result(path: Path) -> ActionResult | None:
    try:
        with open_unlinked(path) as file:
            return ActionResult.from_bytes(_read_limited(file))
    except (FileNotFoundError, ArtifactError):  # missing, or something that the store has not written
        return None


def _stat(status: os.stat_result) -> _Stat:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _size(path: Path) -> int:
    """Return the size of a regular file, or -1 if there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1
