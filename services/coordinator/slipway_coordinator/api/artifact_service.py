"""``slipway.v1.ArtifactService``: a project's artifacts, for clients without credentials of the artifact store.

Uploaded content is stored only under the digest computed from it. A project that has not uploaded some content never learns that the
store already has it: otherwise knowing a digest would be as good as having the file.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, TypeVar

from slipway.artifacts import Manifest, ManifestFile
from slipway.artifacts.blobs import Blobs, BlobWriter
from slipway.artifacts.digests import is_digest
from slipway.errors import ServiceError
from slipway.observability import metrics
from slipway.rpc.serving import Context, stream, unary
from slipway.rpc.values import MAX_FILES
from slipway.security.interceptor import current_principal, denied_error, no_artifact_error
from slipway.security.limits import limit_error
from slipway_coordinator.api.requests import ALL_PROJECTS_PARENT, ID, field_error, page_size, project_of, projects_of
from slipway_coordinator.coordinator import Coordinator
from slipway_coordinator.storage.filters import page_start, page_token
from slipway_coordinator.transfers import Key, Transfers, count_refusals
from slipway_protos.v1 import artifact_pb2 as pb
from slipway_protos.v1 import artifact_pb2_grpc

T = TypeVar("T")

_NAME = re.compile(rf"projects/({ID})/artifacts/(sha256:[0-9a-f]{{64}})")
_MEDIA_TYPE_BYTES = 256
_FIRST_BYTES = 64 << 10  # of content, while a file waits for its turn
_PAGE_SIZE, _MAX_PAGE_SIZE = 1000, 10_000
_MOST_REPAIRS = 100
_ADDRESS_SECONDS = 900  # of content in a bucket; long enough to begin, and a response that has begun goes on
_MOST_EXPORTS = 10  # that a response names


async def require_artifacts(coordinator: Coordinator, project: str, digests: Collection[str]) -> None:
    """Check that the caller may use artifacts in a project.

    Raises:
        ArtifactError: ``ARTIFACT_NOT_FOUND`` for the first artifact that is not the project's, whether or not it exists.
    """
    if current_principal.get().may_name_any:
        return
    owned = await coordinator.call(lambda: coordinator.database.ownership.find_owned(project, digests))
    for digest in sorted(set(digests) - owned):
        raise no_artifact_error(project, digest)


class ArtifactService(artifact_pb2_grpc.ArtifactServiceServicer):
    """Artifacts over one coordinator.

    Args:
        coordinator: Knows which project owns which artifact.
        open_blobs: Opens the artifact store when it is first needed.
    """

    def __init__(self, coordinator: Coordinator, open_blobs: Callable[[], Blobs]) -> None:
        self._coordinator = coordinator
        self._open_blobs = open_blobs
        self._opened: Blobs | None = None
        self._manifest = "", Manifest(())
        self._repairs: dict[
            tuple[str, str], frozenset[str]
        ] = {}  # content that a project's artifact lacks, by caller and project
        self.transfers = Transfers(coordinator.options.transfers)

    @unary
    async def GetArtifact(self, request: pb.GetArtifactRequest, context: Context) -> pb.Artifact:
        """List the files of an artifact."""
        project, digest = await self._require_own(request.name)
        manifest = await self._look(project, (await self._blobs()).manifest, digest)
        files = [
            pb.ArtifactFile(path=f.path, size_bytes=f.size_bytes, digest=f.digest, media_type=f.media_type)
            for f in manifest.files
        ]
        return pb.Artifact(name=f"projects/{project}/artifacts/{digest}", digest=digest, files=files)

    @unary
    async def ListArtifacts(self, request: pb.ListArtifactsRequest, context: Context) -> pb.ListArtifactsResponse:
        """Return a page of digests."""
        size = page_size(request.page_size, default=_PAGE_SIZE, most=_MAX_PAGE_SIZE)
        projects = _listed_projects(request.parent)
        query = (request.parent, "artifacts")
        start = page_start(request.page_token, query=query)
        after = "" if start is None else start[1]
        ownership = self._coordinator.database.ownership
        page = await self._coordinator.call(lambda: ownership.page(projects, limit=size + 1, after=after))
        more = page_token((0.0, page[size - 1]), query=query) if len(page) > size else ""
        return pb.ListArtifactsResponse(digests=page[:size], next_page_token=more)

    @unary
    async def CreateArtifact(self, request: pb.CreateArtifactRequest, context: Context) -> pb.CreateArtifactResponse:
        """Create the artifact, or list the blobs that are missing."""
        project = project_of(request.parent)
        manifest = _manifest_of(request)
        digest, blobs, ownership = manifest.digest, await self._blobs(), self._coordinator.database.ownership
        contents = {file.digest: file for file in manifest.files}
        uploaded = set(contents)
        owned = await self._coordinator.call(lambda: ownership.find_owned(project, [digest]))
        if not owned:
            sizes = {name: file.size_bytes for name, file in contents.items()}
            await self._coordinator.admission.check_content(project, sizes)
        record = functools.partial(ownership.record_artifact, project, digest, manifest)
        if not current_principal.get().may_name_any:
            whole = await self._look(project, blobs.exists, digest) if owned else False
            if whole:
                await self._coordinator.journal.commit(record)
                return pb.CreateArtifactResponse(digest=digest)
            uploaded = await self._coordinator.call(lambda: ownership.find_uploaded(project, contents))
        known = [file for name, file in sorted(contents.items()) if name in uploaded]
        there = await self.transfers.look_up_each(_caller(), project, blobs.has_blob, known)
        kept = {file.digest for file, is_there in zip(known, there, strict=True) if is_there}
        missing = sorted(set(contents) - kept)
        if not missing:
            await self._look(project, blobs.admit, manifest)
            await self._coordinator.journal.commit(record)
        self._note_repair(project, missing if owned else ())
        return pb.CreateArtifactResponse(digest=digest, missing=missing)

    @unary
    async def DeleteArtifact(self, request: pb.DeleteArtifactRequest, context: Context) -> pb.DeleteArtifactResponse:
        """Give up what a project holds of an artifact without an export."""
        project, digest = _parse_name(request.name)
        ownership = self._coordinator.database.ownership
        if not request.allow_missing and not await self._coordinator.call(
            lambda: ownership.find_owned(project, [digest])
        ):
            raise no_artifact_error(project, digest)
        exports = await self._coordinator.journal.commit(lambda: ownership.release(project, digest, most=_MOST_EXPORTS))
        return pb.DeleteArtifactResponse(exports=exports)

    @stream
    async def ReadBlob(self, request: pb.ReadBlobRequest, context: Context) -> AsyncIterator[pb.ReadBlobResponse]:
        """Stream the content of one file."""
        with count_refusals("sent"):
            project, artifact, file = await self._require_file(request.name, request.digest)
            blobs = await self._blobs()
            if not 0 <= request.offset <= file.size_bytes:
                raise _beyond_error(request.offset, file.size_bytes)
            if request.limit < 0:
                raise field_error("limit", request.limit, "is not negative")
            end = file.size_bytes if not request.limit else min(file.size_bytes, request.offset + request.limit)
            left = end - request.offset
            outgoing, content = self.transfers.outgoing, blobs.read(file, artifact, offset=request.offset)
            async with (
                outgoing.turn(_caller(), project=project),
                contextlib.aclosing(outgoing.stream(content)) as chunks,
            ):
                pace, first = self.transfers.pace(), pb.ReadBlobResponse(size_bytes=file.size_bytes)
                async for chunk in chunks:
                    data = chunk[:left]
                    left -= len(data)
                    first.data = data
                    with pace.measure_sending(len(data)):
                        yield first
                    first = pb.ReadBlobResponse()
                    metrics.CLIENT_BYTES.add(len(data), direction="sent")
                    if not left and end < file.size_bytes:  # the whole is read to its end, which compares its digest
                        break
                if request.offset == file.size_bytes:  # no message has said the size
                    yield first

    @unary
    async def LocateBlob(self, request: pb.LocateBlobRequest, context: Context) -> pb.LocateBlobResponse:
        """Return an address of one file's content in the bucket, if clients are to have any."""
        project, _, file = await self._require_file(request.name, request.digest)
        endpoint = self._coordinator.options.download_endpoint
        if not endpoint:
            return pb.LocateBlobResponse()
        begun = time.time()
        uri = await self._look(project, (await self._blobs()).address, file, endpoint, _ADDRESS_SECONDS)
        response = pb.LocateBlobResponse(uri=uri)
        if uri:
            response.expire_time.FromSeconds(int(begun) + _ADDRESS_SECONDS)
        return response

    @unary
    async def WriteBlob(self, request: AsyncIterator[pb.WriteBlobRequest], context: Context) -> pb.WriteBlobResponse:
        """Store the content of one file."""
        with count_refusals("received"):
            first = await anext(request, None)
            if first is None:
                raise ServiceError("the stream has no message", reason="REQUEST_INVALID")
            project, options = project_of(first.parent), self._coordinator.options
            file = _announced_file(first, most=options.upload_bytes)
            counts = 0 if file.digest in self._repairs.get((_caller(), project), ()) else file.size_bytes
            room = self._coordinator.admission.receive(project, file.digest, counts, begins=first.offset == 0)
            async with room:
                with self.transfers.upload(project, most=options.open_uploads):
                    async with self.transfers.incoming.turn(_caller(), project=project):
                        await self._receive((_caller(), project, file.digest), file, first, request)
                ownership = self._coordinator.database.ownership
                await self._coordinator.call(lambda: ownership.record_upload(project, file.digest, size_bytes=counts))
        return pb.WriteBlobResponse()

    @unary
    async def GetUpload(self, request: pb.GetUploadRequest, context: Context) -> pb.GetUploadResponse:
        """Return the byte at which an interrupted upload can continue."""
        key = _caller(), project_of(request.parent), _digest_of(request.digest)
        return pb.GetUploadResponse(offset=self.transfers.interrupted.position(key))

    def _note_repair(self, project: str, missing: Collection[str]) -> None:
        """Remember what the last artifact lacks that a caller made again: what a project has already may be uploaded within any limit."""
        key = _caller(), project
        self._repairs.pop(key, None)
        if missing:
            self._repairs[key] = frozenset(missing)
            if len(self._repairs) > _MOST_REPAIRS:
                del self._repairs[next(iter(self._repairs))]

    async def _receive(
        self, key: Key, file: ManifestFile, first: pb.WriteBlobRequest, rest: AsyncIterator[pb.WriteBlobRequest]
    ) -> None:
        """Store content if it matches the announced size and digest. If its client breaks off, keep the received part for a while."""
        run, pace, data = self.transfers.incoming.run, self.transfers.pace(), first.data
        writer = await self._writer(key, file, offset=first.offset)
        try:
            while True:
                metrics.CLIENT_BYTES.add(len(data), direction="received")
                pace.count_bytes(len(data))
                await run(writer.write, data)
                more = await pace.next(rest)
                if more is None:
                    break
                data = more.data
            await run(writer.commit)
        finally:
            if 0 < (writer.position or 0) < file.size_bytes:  # to the server, a lost client is one that sends no more
                self.transfers.interrupted.keep(key, writer)
            else:
                await run(writer.discard)

    async def _writer(self, key: Key, file: ManifestFile, *, offset: int) -> BlobWriter:
        """Return a new writer, or the writer of the interrupted upload that ended at ``offset`` if that is not 0.

        A new writer replaces an interrupted one.

        Raises:
            ServiceError: ``UPLOAD_LOST`` if no upload ended there.
        """
        interrupted = self.transfers.interrupted
        if not offset:
            interrupted.drop(key)
            return (await self._blobs()).writer(file)
        writer = interrupted.take(key, offset=offset, size_bytes=file.size_bytes)
        if writer is None:
            raise ServiceError(
                f"no interrupted upload of {file.digest} ended at byte {offset}",
                reason="UPLOAD_LOST",
                remedy="ask GetUpload where it ended, and go on from there",
                about={"field": "offset"},
            )
        return writer

    async def _require_own(self, name: str) -> tuple[str, str]:
        """Return project and digest of an artifact that the caller may read."""
        project, digest = _parse_name(name)
        await require_artifacts(self._coordinator, project, [digest])
        return project, digest

    async def _require_file(self, name: str, content: str) -> tuple[str, str, ManifestFile]:
        """Return project and digest of an artifact that the caller may read, and its file with that content.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``.
        """
        project, artifact = await self._require_own(name)
        manifest = await self._cached_manifest(project, await self._blobs(), artifact)
        file = next((file for file in manifest.files if file.digest == content), None)
        if file is None:
            raise no_artifact_error(project, f"{artifact} with a file {content[:80]}")
        return project, artifact, file

    async def _cached_manifest(self, project: str, blobs: Blobs, digest: str) -> Manifest:
        """Return a manifest; the last one is cached, because a client reads its files one after the other."""
        last, manifest = self._manifest
        if last != digest:
            manifest = await self._look(project, blobs.manifest, digest)
            self._manifest = digest, manifest
        return manifest

    async def _blobs(self) -> Blobs:
        if self._opened is None:
            self._opened = await self.transfers.looks.run(self._open_blobs)
        return self._opened

    async def _look(self, project: str, function: Callable[..., T], *arguments: Any) -> T:
        return await self.transfers.look_up(_caller(), project, function, *arguments)


def _parse_name(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise field_error("name", name, "is like projects/default/artifacts/sha256:<64 hex digits>")
    return match[1], match[2]


def _listed_projects(parent: str) -> Collection[str] | None:
    """Return the projects whose artifacts a list has; None for all there are.

    ``projects/-`` is for callers of all projects alone, because whoever removes what no project has takes the list for complete.

    Raises:
        ServiceError: reason ``REQUEST_INVALID`` or ``PERMISSION_DENIED``.
    """
    principal = current_principal.get()
    projects = projects_of(parent, principal)
    if parent == ALL_PROJECTS_PARENT and projects is not None:
        raise denied_error(f"{principal.name} is not of all projects", remedy="name one of your own projects")
    return projects


def _beyond_error(offset: int, size_bytes: int) -> ServiceError:
    return ServiceError(
        f"offset is {offset}",
        reason="REQUEST_INVALID",
        remedy=f"it is between 0 and the file's size of {size_bytes}",
        about={"field": "offset", "size_bytes": size_bytes},
    )


def _caller() -> str:
    return current_principal.get().name


def _manifest_of(request: pb.CreateArtifactRequest) -> Manifest:
    if len(request.files) > MAX_FILES:
        raise limit_error(f"files has {len(request.files)} entries, {MAX_FILES} are allowed", field="files")
    for file in request.files:
        if len(file.media_type.encode()) > _MEDIA_TYPE_BYTES:
            raise limit_error(f"a media_type has over {_MEDIA_TYPE_BYTES} bytes", field="files.media_type")
    return Manifest.of(ManifestFile(f.path, f.size_bytes, f.digest, f.media_type) for f in request.files)


def _digest_of(text: str) -> str:
    if not is_digest(text):
        raise field_error("digest", text, "is sha256: and 64 hexadecimal digits")
    return text


def _announced_file(first: pb.WriteBlobRequest, *, most: int) -> ManifestFile:
    """Return the file that the first message of an upload announces."""
    _digest_of(first.digest)
    if first.size_bytes < 0:
        raise field_error("size_bytes", first.size_bytes, "is not negative")
    if not 0 <= first.offset <= first.size_bytes:
        raise field_error("offset", first.offset, f"is between 0 and size_bytes, {first.size_bytes}")
    if len(first.data) > _FIRST_BYTES:
        raise limit_error(
            f"data of the first message has {len(first.data)} bytes, {_FIRST_BYTES} are allowed", field="data"
        )
    if first.size_bytes > most:
        raise ServiceError(
            f"size_bytes is {first.size_bytes}, {most} are allowed",
            reason="LIMIT_EXCEEDED",
            remedy="upload it with the store's own credentials, or raise the coordinator's SLIPWAY_UPLOAD_SIZE",
            about={"field": "size_bytes"},
        )
    return ManifestFile("", first.size_bytes, first.digest, "")
