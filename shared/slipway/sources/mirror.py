"""Mirror an origin as a local folder in which every file has its name and size; and the files of a bucket as an origin.

Only descriptions have content: configurations, trainer states, indexes and safetensors headers are read. All other content is a hole
of the right size, so a run with a hundred checkpoints is listed and checked in seconds, by the code that checks folders.
"""

from __future__ import annotations

import copy
import hashlib
import json
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Self

from slipway.artifacts import ActionResult, Artifacts
from slipway.artifacts.blobs import Blobs
from slipway.artifacts.files import in_threads
from slipway.artifacts.manifest import Manifest, ManifestFile, check_path, media_type
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.transfer import download, workers
from slipway.artifacts.store import OnBytes
from slipway.errors import ArtifactError
from slipway.sources.origins import OnWait, Origin, OriginFile

_READ = ("config.json", "generation_config.json", "adapter_config.json", "trainer_state.json", ".index.json")
_LARGEST_READ = 64 << 20
_FIRST_BYTES = 64 << 10  # holds the header of most adapters, so that one request is enough
_REMEMBERED_BYTES = 64 << 20
"""Files of at least this size are remembered one by one, so that an interrupted import skips those it has finished."""
MOST_FILES = 20_000


class Mirror:
    """The files of an origin in a local folder.

    Args:
        origin: The origin.
        folder: New folder for the mirror.
        on_wait: Called now and then while the origin is read; an exception from it ends that.

    Raises:
        ArtifactError: ``SOURCE_NOT_FOUND`` if there are no files; ``LIMIT_EXCEEDED`` for more than 20,000 files; ``ARTIFACT_INVALID`` for
            a name that could leave the folder; and errors of the origin.
    """

    def __init__(self, origin: Origin, folder: Path, *, on_wait: OnWait = lambda: None) -> None:
        self.origin, self.folder = origin, folder
        self.read_bytes = 0
        listed = origin.listing(most=MOST_FILES)
        if not listed:
            raise ArtifactError(
                f"nothing lies below {origin.url}",
                reason="SOURCE_NOT_FOUND",
                remedy="check bucket and prefix, and AWS_ENDPOINT_URL",
                about={"source": origin.url},
            )
        if len(listed) > MOST_FILES:
            raise ArtifactError(
                f"{len(listed)} files lie below {origin.url}, {MOST_FILES} are allowed",
                reason="LIMIT_EXCEEDED",
                remedy="name the folder of one training run or model",
                about={"source": origin.url},
            )
        self._files = {file.key: file for file in listed}
        for key in self._files:
            check_path(key)
        folders = {parent.as_posix() for key in self._files for parent in PurePosixPath(key).parents}
        if both := sorted(folders & self._files.keys()):
            raise ArtifactError(
                f"{both[0]!r} below {origin.url} is a file and a folder",
                reason="ARTIFACT_INVALID",
                remedy="remove one of them, or name the folder of one training run or model",
                about={"source": origin.url},
            )
        for name in sorted(folders):
            (folder / name).mkdir(parents=True, exist_ok=True)
        in_threads(self._look, self._files.values(), lambda _: on_wait())

    def put(self, files: Mapping[str, Path], store: Artifacts, *, scratch: Path, on_bytes: OnBytes) -> str:
        """Store files of the mirror with their content; return the digest.

        The same files are not read again: the store remembers the artifact made of these versions.

        Raises:
            ArtifactError: ``FILE_ERROR`` if a file was replaced since it was listed; errors of the origin and the store's ``put``.
        """
        chosen = self._choose(files)
        if known := self._find_known(chosen, store):
            return known
        with workers() as pool:

            def fetch(item: tuple[str, OriginFile], count: OnBytes) -> None:
                name, file = item
                path = scratch / name
                path.parent.mkdir(parents=True, exist_ok=True)
                origin = self.origin.during(lambda: count(0))
                origin.download(file, path, pool=pool, on_bytes=count)
                _check_same(origin, file)

            in_threads(fetch, chosen.items(), on_bytes)
        digest = store.put(scratch)
        store.record_action(self._key(chosen), ActionResult({"source": digest}))
        return digest

    def bring(
        self, files: Mapping[str, Path], store: Artifacts, blobs: Blobs, *, scratch: Path, on_bytes: OnBytes
    ) -> str:
        """As :meth:`put`, but file by file, so that only the files in transfer take space in ``scratch``.

        Large files read before are not read again. It is not enough that an origin names a digest that the store has: the file must
        have been read from the origin once, otherwise knowing a digest would be as good as having the file.

        Args:
            files: Files of the mirror by their path inside the artifact.
            store: Remembers the results.
            blobs: The same store, file by file.
            scratch: Folder for files in transfer.
            on_bytes: Gets the bytes that are done, read or not.
        """
        chosen = self._choose(files)
        if known := self._find_known(chosen, store):
            on_bytes(sum(file.size_bytes for file in chosen.values()))
            return known
        with workers() as pool:

            def bring(item: tuple[str, OriginFile], count: OnBytes) -> ManifestFile:
                name, file = item
                digest = self._recall(file, store)
                entry = ManifestFile(name, file.size_bytes, digest, media_type(name))
                if digest and blobs.has_blob(entry):
                    count(file.size_bytes)
                    return entry
                origin, path = self.origin.during(lambda: count(0)), scratch / uuid.uuid4().hex
                try:
                    digest = origin.download(file, path, pool=pool, on_bytes=count)
                    _check_same(origin, file)
                    entry = ManifestFile(name, file.size_bytes, digest, media_type(name))
                    blobs.keep(entry, path, on_bytes=count)
                    self.read_bytes += file.size_bytes  # not locked: a lost update only makes the figure smaller
                finally:
                    path.unlink(missing_ok=True)
                self._remember(file, digest, store, blobs)
                return entry

            entries = in_threads(bring, chosen.items(), on_bytes)
        manifest = Manifest.of(entries)
        blobs.admit(manifest)
        store.record_action(self._key(chosen), ActionResult({"source": manifest.digest}))
        return manifest.digest

    def _choose(self, files: Mapping[str, Path]) -> dict[str, OriginFile]:
        return {name: self._files[path.relative_to(self.folder).as_posix()] for name, path in sorted(files.items())}

    def _find_known(self, chosen: Mapping[str, OriginFile], store: Artifacts) -> str:
        """Return the digest of the artifact made of these files before; empty if there is none."""
        known = store.action(self._key(chosen))
        return known.outputs.get("source", "") if known is not None else ""

    def _key(self, chosen: Mapping[str, OriginFile]) -> str:
        described = [[name, file.key, file.version, file.size_bytes] for name, file in sorted(chosen.items())]
        document = {"source": self.origin.where, "objects": described}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def _file_key(self, file: OriginFile) -> str:
        """Return the key of a single file: its digest, which later commits may share, or else its place and version."""
        if not file.digest:
            return self._key({"": file})
        return hashlib.sha256(json.dumps({"service": self.origin.service, "digest": file.digest}).encode()).hexdigest()

    def _recall(self, file: OriginFile, store: Artifacts) -> str:
        """Return the digest of a large file read before; empty if it is unknown or was collected."""
        if file.size_bytes < _REMEMBERED_BYTES:
            return ""
        known = store.action(self._file_key(file))
        return store.manifest(known.outputs["file"]).files[0].digest if known is not None else ""

    def _remember(self, file: OriginFile, digest: str, store: Artifacts, blobs: Blobs) -> None:
        """Record the digest of a large file as an artifact of its own, which protects it from collection meanwhile."""
        if file.size_bytes >= _REMEMBERED_BYTES:
            single = Manifest.of([ManifestFile("file", file.size_bytes, digest, media_type(file.key))])
            blobs.admit(single)
            store.record_action(self._file_key(file), ActionResult({"file": single.digest}))

    def _look(self, file: OriginFile, count: OnBytes) -> None:
        count(0)
        origin = self.origin.during(lambda: count(0))
        path = self.folder / file.key
        head = b""
        if path.name.endswith(_READ) and file.size_bytes <= _LARGEST_READ:
            head = origin.read(file, 0, 0) if file.size_bytes else b""
        elif path.suffix == ".safetensors" and file.size_bytes:
            head = origin.read(file, 0, min(_FIRST_BYTES, file.size_bytes))
            needed = min(8 + int.from_bytes(head[:8], "little"), file.size_bytes, _LARGEST_READ)
            if needed > len(head):
                head += origin.read(file, len(head), needed - len(head))
        with path.open("xb") as target:
            target.write(head)
            target.truncate(file.size_bytes)


def _check_same(origin: Origin, file: OriginFile) -> None:
    if not origin.still_has(file):
        url = f"{origin.url}/{file.key}"
        raise ArtifactError(
            f"{url} was replaced or removed while it was being read",
            reason="FILE_ERROR",
            remedy="try again once no program writes there any more",
            about={"source": url},
        )


class BucketOrigin:
    """The files below a prefix of a bucket."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket
        self.url = self.pinned = bucket.url
        self.where = self.service = bucket.where

    def during(self, on_wait: OnWait) -> Self:
        """As :meth:`~slipway.sources.origins.Origin.during`."""
        watched = copy.copy(self)
        watched._bucket = self._bucket.during(on_wait)
        return watched

    def listing(self, *, most: int) -> list[OriginFile]:
        """As :meth:`~slipway.sources.origins.Origin.listing`; placeholders of folders are left out."""
        entries = [entry for entry in self._bucket.listing(most=most + 1) if not entry.key.endswith("/")]
        return [OriginFile(entry.key, entry.size_bytes, entry.etag) for entry in entries]

    def read(self, file: OriginFile, offset: int, length: int) -> bytes:
        """As :meth:`~slipway.sources.origins.Origin.read`."""
        return self._bucket.get_range(file.key, offset, length)

    def download(self, file: OriginFile, target: Path, *, pool: ThreadPoolExecutor, on_bytes: OnBytes) -> str:
        """As :meth:`~slipway.sources.origins.Origin.download`, several parts at the same time."""
        return download(self._bucket, file.key, file.size_bytes, target, pool=pool, on_bytes=on_bytes)

    def still_has(self, file: OriginFile) -> bool:
        """As :meth:`~slipway.sources.origins.Origin.still_has`, by its entity tag."""
        current = self._bucket.find(file.key)
        return current is not None and (current.etag, current.size_bytes) == (file.version, file.size_bytes)
