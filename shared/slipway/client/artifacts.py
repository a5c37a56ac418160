"""A project's artifacts through a coordinator, without credentials for the artifact store."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, TypeVar

import grpc

from slipway.artifacts import ActionResult, Manifest, ManifestFile
from slipway.artifacts.blobs import CHUNK_BYTES
from slipway.artifacts.faults import corrupt_error, disk_full, unreadable_error
from slipway.artifacts.files import add_name, in_threads, regular_files, write_all
from slipway.artifacts.manifest import describe_file
from slipway.artifacts.store import NOTHING_KNOWN, Known, OnBytes
from slipway.client.calls import BlockingCalls, artifact_name, is_temporary
from slipway.client.direct import FAULTS, read_address
from slipway.errors import ArtifactError
from slipway.files.paths import open_real, open_unlinked
from slipway.rpc.values import MAX_FILES, retry_seconds, sendable
from slipway_protos.v1 import artifact_pb2 as pb

T = TypeVar("T")
_Open = Callable[[Path], BinaryIO]

PATIENCE_SECONDS = 120.0
_ROUNDS = 3
_LONGEST_PAUSE_SECONDS = 5.0
_DIRECT_BYTES = 8 << 20
"""Smaller files pass through the coordinator: asking for an address would take as long."""

log = logging.getLogger("slipway.client")

# A server that stops cancels its streams; other clients of the project may use all its uploads for a while.
_TEMPORARY = ("CANCELLED", "CALL_TIMEOUT", "REQUESTS_FULL", "UPLOADS_FULL")


class ProjectArtifacts:
    """:class:`~slipway.artifacts.store.Artifacts` of one project. Fetched content is compared with its digests.

    A transfer resumes by itself if the coordinator is unavailable for up to two minutes. Large files are fetched from the bucket, if the
    coordinator gives addresses there.

    Args:
        calls: The connection to the coordinator.
        project: Owner of the artifacts.
        manifests: Manifests of the project's artifacts that are known already, by digest; new ones are added.
    """

    def __init__(
        self, calls: BlockingCalls, project: str, *, manifests: MutableMapping[str, Manifest] | None = None
    ) -> None:
        self._calls, self._project = calls, project
        self._manifests = {} if manifests is None else manifests
        self._direct = True

    @property
    def where(self) -> str:
        """Coordinator and project."""
        return f"{self._calls.address}, project {self._project}"

    def put(self, folder: Path, *, known: Known = NOTHING_KNOWN, on_bytes: OnBytes | None = None) -> str:
        """Upload a folder; return the artifact's digest."""
        return self._put(dict(regular_files(folder)), open_unlinked, known, on_bytes)

    def put_files(self, files: Mapping[str, Path], *, on_bytes: OnBytes | None = None) -> str:
        """Upload files, given as real paths by path inside the artifact; return the artifact's digest.

        Only content that the project lacks is sent.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID``, ``LINK_OUTSIDE`` for a path with a link in it, ``LIMIT_EXCEEDED`` for more files
                than a message can list, or ``FILE_ERROR`` if a file cannot be read or changes meanwhile.
            ModelExportError: An error from the coordinator.
        """
        return self._put(files, open_real, NOTHING_KNOWN, on_bytes)

    def _put(self, files: Mapping[str, Path], open_file: _Open, known: Known, on_bytes: OnBytes | None) -> str:
        if len(files) > MAX_FILES:  # fail before hours of hashing
            raise ArtifactError(
                f"{len(files)} files are too many for one artifact of {self.where}: {MAX_FILES} are allowed",
                reason="LIMIT_EXCEEDED",
                remedy="upload the folder of one checkpoint, or write to the artifact store itself",
            )
        tell = on_bytes or _ignore

        def describe(item: tuple[str, Path], count: OnBytes) -> ManifestFile:
            with _open_readable(item[1], open_file) as file:
                return describe_file(item[0], file, known=known.get(item[1]), on_bytes=lambda _: count(0))

        manifest = Manifest.of(in_threads(describe, sorted(files.items()), tell))
        paths = {file.digest: files[file.path] for file in manifest.files}
        contents = {file.digest: file for file in manifest.files}
        sent: set[str] = set()
        answer = self.create(manifest)  # raises at once if the first call never succeeds
        for _ in range(_ROUNDS):
            for digest in sorted(set(contents) - set(answer.missing) - sent):
                tell(contents[digest].size_bytes)
            sent |= set(contents)
            if not answer.missing:
                break
            in_threads(
                lambda digest, count: self._send(contents[digest], paths[digest], open_file, count),
                answer.missing,
                tell,
            )
            answer = self._retry(
                lambda _: self._calls.send(self._calls.artifacts.CreateArtifact, self._request(manifest))
            )
        if not answer.missing:
            return answer.digest
        raise ArtifactError(
            f"content uploaded to {self.where} was removed again, first {answer.missing[0]}",
            reason="STORE_UNAVAILABLE",
            remedy="try again when no garbage collection runs",
        )

    def create(self, manifest: Manifest) -> pb.CreateArtifactResponse:
        """Make an artifact of uploaded content, or get the digests that are missing; :meth:`put_files` does the whole upload."""
        return self._calls.call(self._calls.artifacts.CreateArtifact, self._request(manifest))

    def _request(self, manifest: Manifest) -> pb.CreateArtifactRequest:
        files = [pb.ArtifactFile(**asdict(file)) for file in manifest.files]
        return pb.CreateArtifactRequest(parent=f"projects/{self._project}", files=files)

    def fetch(self, digest: str, target: Path, *, on_bytes: OnBytes | None = None) -> Path:
        """Write an artifact's files below ``target``, which must not exist.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``, ``ARTIFACT_CORRUPT`` or ``DISK_FULL``.
            ModelExportError: An error from the coordinator.
        """
        manifest = self.manifest(digest)
        first = {file.digest: file for file in reversed(manifest.files)}
        with disk_full("fetching", digest, at=target):
            target.mkdir(parents=True)
            for file in manifest.files:
                (target / file.path).parent.mkdir(parents=True, exist_ok=True)
            in_threads(
                lambda file, count: self._receive(file, digest, target / file.path, count), first.values(), on_bytes
            )
            for file in manifest.files:
                if first[file.digest] != file:
                    add_name(target / first[file.digest].path, target / file.path)
        return target

    def read(self, file: ManifestFile, artifact: str, *, offset: int = 0) -> Iterator[bytes]:
        """Yield a file's content from an offset. Content read from the beginning is compared with its digest.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``, or ``ARTIFACT_CORRUPT`` after the last chunk.
            ModelExportError: An error from the coordinator.
        """
        request = pb.ReadBlobRequest(
            name=artifact_name(artifact, project=self._project), digest=file.digest, offset=offset
        )
        with self._calls.calling():
            call = self._calls.artifacts.ReadBlob(request, metadata=self._calls.metadata())
        sha = hashlib.sha256()
        try:
            for answer in call:
                sha.update(answer.data)
                yield answer.data
        except grpc.RpcError as error:
            raise self._calls.failure(error).error() from error
        finally:
            call.cancel()
        if not offset and f"sha256:{sha.hexdigest()}" != file.digest:
            raise corrupt_error(artifact, file.path)

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of an artifact.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``; ``ARTIFACT_CORRUPT`` or ``ARTIFACT_INVALID`` for a response that is not this artifact.
        """
        if digest not in self._manifests:
            request = pb.GetArtifactRequest(name=artifact_name(digest, project=self._project))
            artifact = self._calls.call(self._calls.artifacts.GetArtifact, request)
            manifest = Manifest.of(ManifestFile(f.path, f.size_bytes, f.digest, f.media_type) for f in artifact.files)
            if manifest.digest != digest:
                raise corrupt_error(digest, "its manifest")
            self._manifests[digest] = manifest
        return self._manifests[digest]

    def exists(self, digest: str) -> bool:
        """Return whether the project has an artifact."""
        try:
            self.manifest(digest)
        except ArtifactError as error:
            if error.reason != "ARTIFACT_NOT_FOUND":
                raise
            return False
        return True

    def digests(self) -> list[str]:
        """Return the digests of the project's artifacts, sorted."""
        return list(list_artifacts(self._calls, self._project))

    def action(self, key: str) -> ActionResult | None:  # noqa: ARG002 - the protocol's
        """Return None: clients have no access to recorded results."""
        return None

    def record_action(self, key: str, result: ActionResult) -> None:
        """Do nothing, for the same reason."""

    def _send(self, file: ManifestFile, path: Path, open_file: _Open, tell: OnBytes) -> None:
        asks = file.size_bytes > CHUNK_BYTES  # for a small file, asking would take as long as sending it
        told = 0  # bytes already reported as sent; sending them again is not reported

        def attempt(progress: Callable[[], None]) -> None:
            offset = self._count_kept_bytes(file) if asks else 0
            with _open_readable(path, open_file) as source:

                def on(sent: int) -> None:
                    nonlocal told
                    tell(max(sent - told, 0))
                    told = max(sent, told)
                    progress()

                requests = _Requests(self._project, file, source, on, offset=offset)
                try:
                    with self._calls.calling():
                        self._calls.artifacts.WriteBlob(iter(requests), metadata=self._calls.metadata())
                except grpc.RpcError:
                    if requests.error is not None:
                        raise requests.error from None
                    raise

        self._retry(attempt, also=("TRANSFER_SLOW",))  # it resumes where it ended

    def _count_kept_bytes(self, file: ManifestFile) -> int:
        """Return how many bytes of an interrupted upload the coordinator still has; 0 for an older one that cannot tell."""
        request = pb.GetUploadRequest(parent=f"projects/{self._project}", digest=file.digest)
        try:
            offset = self._calls.send(self._calls.artifacts.GetUpload, request).offset
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return 0
            raise
        return offset if 0 <= offset <= file.size_bytes else 0

    def _receive(self, file: ManifestFile, artifact: str, path: Path, tell: OnBytes) -> None:
        """Write one verified file; if content that was resumed, or came from elsewhere, has the wrong digest, fetch it once more."""
        name = artifact_name(artifact, project=self._project)
        with path.open("x+b", buffering=0) as target:
            for first in (True, False):
                sha, resumed = hashlib.sha256(), 0
                target.seek(0)
                if first and file.size_bytes >= _DIRECT_BYTES:
                    self._receive_directly(file, name, target, sha, tell)
                    resumed += target.tell() > 0

                def attempt(progress: Callable[[], None], sha: hashlib._Hash = sha) -> None:
                    nonlocal resumed
                    offset = target.tell()
                    resumed += offset > 0
                    request = pb.ReadBlobRequest(name=name, digest=file.digest, offset=offset)
                    with self._calls.calling():
                        call = self._calls.artifacts.ReadBlob(request, metadata=self._calls.metadata())
                    try:
                        for answer in call:
                            write_all(target, answer.data)
                            sha.update(answer.data)
                            tell(len(answer.data))
                            progress()
                    finally:
                        call.cancel()

                if target.tell() < file.size_bytes or not file.size_bytes:
                    self._retry(attempt, also=("TRANSFER_SLOW",))  # it resumes where it ended
                if f"sha256:{sha.hexdigest()}" == file.digest:
                    return
                if not resumed:
                    break
        raise corrupt_error(artifact, file.path)

    def _receive_directly(
        self, file: ManifestFile, name: str, target: BinaryIO, sha: hashlib._Hash, tell: OnBytes
    ) -> None:
        """Write what the bucket gives of a file, if the coordinator names an address; what is missing then passes through the coordinator."""
        if not self._direct:
            return
        try:
            found = self._calls.send(
                self._calls.artifacts.LocateBlob, pb.LocateBlobRequest(name=name, digest=file.digest)
            )
        except grpc.RpcError as error:  # an earlier version has no such call; whatever else is wrong, ReadBlob says
            self._direct = error.code() is not grpc.StatusCode.UNIMPLEMENTED
            return
        if not found.uri:
            self._direct = False
            return
        with closing(read_address(found.uri, offset=0, size_bytes=file.size_bytes)) as chunks:
            while True:
                try:
                    data = next(chunks, b"")
                except FAULTS as error:
                    self._direct = False  # its timeout is not waited for with each file
                    log.warning(
                        "%s passes through the coordinator: its address in the bucket failed: %s", file.path, error
                    )
                    return
                if not data:
                    return
                write_all(target, data)
                sha.update(data)
                tell(len(data))

    def _retry(self, attempt: Callable[[Callable[[], None]], T], *, also: Collection[str] = ()) -> T:
        """Retry while the coordinator is unavailable or the failure is temporary. An attempt calls ``progress`` as it advances.

        Raises:
            ModelExportError: The failure, if another attempt cannot help or there was no progress for too long.
        """
        last, pause = time.monotonic(), 0.1

        def progress() -> None:
            nonlocal last, pause
            last, pause = time.monotonic(), 0.1

        while True:
            try:
                return attempt(progress)
            except grpc.RpcError as error:
                failure = self._calls.failure(error)
                if not is_temporary(failure, *_TEMPORARY, *also) or time.monotonic() - last >= PATIENCE_SECONDS:
                    raise failure.error() from error
            pause = max(pause, min(retry_seconds(failure) or 0.0, PATIENCE_SECONDS))
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - so that many clients do not return all at once
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def list_artifacts(calls: BlockingCalls, project: str, *, page_size: int = 0) -> Iterator[str]:
    """Yield the digests of a project's artifacts (``-``: of all projects), sorted, fetched page by page."""
    request = pb.ListArtifactsRequest(parent=sendable(f"projects/{project}"), page_size=page_size)
    while True:
        response = calls.call(calls.artifacts.ListArtifacts, request)
        yield from response.digests
        request.page_token = response.next_page_token
        if not request.page_token:
            return


class _Requests:
    """The messages of an upload. gRPC reads them in its own thread and hides errors there, so ``error`` keeps them."""

    def __init__(self, project: str, file: ManifestFile, source: BinaryIO, tell: OnBytes, *, offset: int) -> None:
        self.error: Exception | None = None
        self._project, self._file, self._source, self._tell, self._offset = project, file, source, tell, offset

    def __iter__(self) -> Iterator[pb.WriteBlobRequest]:
        file = self._file
        try:
            yield pb.WriteBlobRequest(
                parent=f"projects/{self._project}",
                digest=file.digest,
                size_bytes=file.size_bytes,
                offset=self._offset,
            )
            sent = self._source.seek(self._offset)
            while data := self._source.read(CHUNK_BYTES):
                yield pb.WriteBlobRequest(data=data)
                sent += len(data)
                self._tell(sent)
        except OSError as error:
            self.error = ArtifactError(f"cannot read {self._source.name}: {error.strerror}", reason="FILE_ERROR")
            raise
        except Exception as error:
            self.error = error
            raise


def _open_readable(path: Path, open_file: _Open) -> BinaryIO:
    try:
        return open_file(path)
    except OSError as error:
        raise unreadable_error(path, error) from error


def _ignore(_: int) -> None:
    """Count nothing."""
