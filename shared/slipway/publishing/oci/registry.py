"""One repository of a registry: blobs and manifests by digest, tags, and what refers to a manifest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipway.artifacts.digests import digest_bytes, is_digest
from slipway.errors import ArtifactError
from slipway.files.json_documents import parse_json
from slipway.publishing.oci.tars import ReadAt
from slipway.publishing.release import OnBytes
from slipway.texts import one_line, shortened

if TYPE_CHECKING:
    from slipway.publishing.connections import Answer
    from slipway.publishing.oci.transport import Transport

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
TITLE = "org.opencontainers.image.title"
CHUNK_BYTES = 64 << 20
"""Bytes of one request of an upload: what is sent again at most if a connection breaks."""
MOST_DESCRIPTORS = 20_000
_MEDIA_TYPE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9!#$&^_.+-]{0,126}/[a-zA-Z0-9][a-zA-Z0-9!#$&^_.+-]{0,126}")
_RANGE = re.compile(r"(?:bytes=)?0-(\d{1,18})")
_TRIES = 5
"""Fewest times that a chunk is sent: over a slow connection, two tries may already take all the time that there is."""
_BOTH = f"{INDEX_TYPE}, {MANIFEST_TYPE}"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a manifest says of a blob or another manifest."""

    media_type: str
    digest: str
    size_bytes: int
    annotations: dict[str, str]
    artifact_type: str = ""

    @classmethod
    def parse(cls, document: Any) -> Descriptor:
        """Read a descriptor.

        Raises:
            ValueError: It is none.
        """
        if not isinstance(document, dict):
            raise ValueError("it lists something that is no descriptor")  # noqa: TRY004 - the registry is at fault
        kind, digest, size = (document.get(name) for name in ("mediaType", "digest", "size"))
        annotations, artifact = document.get("annotations") or {}, document.get("artifactType", "")
        if not isinstance(kind, str) or _MEDIA_TYPE.fullmatch(kind) is None or not isinstance(artifact, str):
            raise ValueError("it lists something without a media type")
        if not isinstance(digest, str) or not is_digest(digest):
            raise ValueError("it lists something without a SHA-256 digest")
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise ValueError("it lists something without a size")
        if not isinstance(annotations, dict) or not all(isinstance(v, str) for v in annotations.values()):
            raise ValueError("it lists something whose annotations are no texts")
        return cls(kind, digest, size, annotations, artifact)

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as a manifest has it."""
        document: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size_bytes}
        if self.artifact_type:
            document["artifactType"] = self.artifact_type
        if self.annotations:
            document["annotations"] = self.annotations
        return document


class Repository:
    """A repository of a registry.

    Args:
        transport: Connections to the registry.
        name: Its name; by default that of the transport's address.
    """

    def __init__(self, transport: Transport, name: str = "") -> None:
        self._transport = transport
        self.name = name or transport.address.name
        self._path = f"{self.name}/"

    def reach(self) -> None:
        """Ask the registry whether it takes the credentials.

        Raises:
            ArtifactError: As :meth:`Transport.repeat`; ``STORE_DENIED``.
        """
        doing = "asking whether it is a registry"
        answer = self._transport.repeat(doing, lambda: self._transport.request("GET", self._transport.base))
        if answer.status != 200:
            raise self._transport.refusal(doing, answer)

    def has_blob(self, digest: str, size: int) -> bool:
        """Return whether the repository has a blob of this size.

        Raises:
            ArtifactError: As :meth:`Transport.repeat`.
        """
        doing = f"looking for {digest[:19]}"
        answer = self._call(doing, "HEAD", f"blobs/{digest}")
        if answer.status == 404:
            return False
        if answer.status != 200:
            raise self._transport.refusal(doing, answer)
        return answer.headers.get("content-length", str(size)) == str(size)

    def put_bytes(self, data: bytes) -> None:
        """Send a small blob, unless it is there."""
        digest = digest_bytes(data)
        if not self.has_blob(digest, len(data)):
            self._finish(digest, self._begin(digest), body=data)

    def put_blob(self, read_at: ReadAt, digest: str, size: int, *, on_bytes: OnBytes) -> None:
        """Send a blob in chunks; go on where a broken chunk ended.

        A registry may still be storing what it received when it is asked how much that was, and refuse to go on there: so each
        repeat that brings nothing new waits longer than the last.

        Args:
            read_at: Reads it at given positions.
            digest: Its digest, which the registry compares.
            size: Its size in bytes.
            on_bytes: Called with the size of each piece.

        Raises:
            ArtifactError: As :meth:`Transport.repeat`; ``ARTIFACT_CORRUPT`` if the registry received something else.
        """
        from urllib3.exceptions import HTTPError

        place, offset, farthest, fruitless = self._begin(digest), 0, -1, 0
        backoff = self._transport.backoff()
        while offset < size:
            length = min(CHUNK_BYTES, size - offset)
            span = _Span(read_at, offset, length, on_bytes)
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(length),
                "Content-Range": f"{offset}-{offset + length - 1}",
            }
            try:
                answer = self._transport.request("PATCH", place, headers=headers, body=span)
                sent = answer.status in (201, 202, 204)
                if not sent and answer.status not in (404, 408, 416, 429) and answer.status < 500:
                    raise self._transport.refusal(f"sending {digest[:19]}", answer)
            except HTTPError:
                sent = False
            if sent:
                place, offset = self._next(answer, digest), offset + length
                continue
            span.rewind()
            if offset > farthest:
                farthest, fruitless = offset, 0
                backoff.reset()
            fruitless += 1
            if backoff.is_over() and fruitless >= _TRIES:
                raise self._transport.error(
                    f"sending {digest[:19]}", "the connection breaks each time", "STORE_UNAVAILABLE"
                )
            backoff.wait()
            place, offset = self._resume(place, digest)
        self._finish(digest, place)

    def put_manifest(self, data: bytes, media_type: str, reference: str = "") -> Answer:
        """Send a manifest under a tag, or under its digest.

        Raises:
            ArtifactError: As :meth:`Transport.repeat`.
        """
        reference = reference or digest_bytes(data)
        doing = f"writing {reference[:40]}"
        answer = self._call(doing, "PUT", f"manifests/{reference}", headers={"Content-Type": media_type}, body=data)
        if answer.status not in (200, 201, 202):
            raise self._transport.refusal(doing, answer)
        return answer

    def get_manifest(self, reference: str, *, media_types: str = _BOTH) -> tuple[bytes, str]:
        """Return a manifest and its media type; if it was named by digest, it has this digest.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``, ``ARTIFACT_CORRUPT``; as :meth:`Transport.repeat`.
        """
        doing = f"reading {reference[:40]}"
        answer = self._call(doing, "GET", f"manifests/{reference}", headers={"Accept": media_types})
        if answer.status != 200:
            raise self._transport.refusal(doing, answer)
        if is_digest(reference) and digest_bytes(answer.data) != reference:
            raise self._transport.error(doing, "it sends something else", "ARTIFACT_CORRUPT")
        return answer.data, answer.headers.get("content-type", "").partition(";")[0].strip()

    def get_blob(self, descriptor: Descriptor, *, most: int) -> bytes:
        """Return a small blob, compared with its digest.

        Raises:
            ArtifactError: ``LIMIT_EXCEEDED`` if it is larger than ``most``, ``ARTIFACT_CORRUPT``; as :meth:`Transport.repeat`.
        """
        doing = f"reading {shortened(one_line(descriptor.annotations.get(TITLE, ''))) or descriptor.digest[:19]}"
        if descriptor.size_bytes > most:
            raise self.too_large(doing, f"a document has {descriptor.size_bytes} bytes, and may have {most}")
        answer = self._call(doing, "GET", f"blobs/{descriptor.digest}", most=descriptor.size_bytes)
        if answer.status != 200:
            raise self._transport.refusal(doing, answer)
        if f"sha256:{hashlib.sha256(answer.data).hexdigest()}" != descriptor.digest:
            raise self._transport.error(doing, "it sends something else", "ARTIFACT_CORRUPT")
        return answer.data

    def referrers(self, digest: str) -> tuple[list[Descriptor], bool]:
        """Return what refers to a manifest, and whether the registry itself keeps account of it.

        A registry that does not has an index under a tag made of the digest, as its clients agreed.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID``; as :meth:`Transport.repeat`.
        """
        doing = "reading what refers to the model"
        answer = self._call(doing, "GET", f"referrers/{digest}", headers={"Accept": INDEX_TYPE})
        own = answer.status == 200
        if not own:
            tag = fallback_tag(digest)
            answer = self._call(doing, "GET", f"manifests/{tag}", headers={"Accept": INDEX_TYPE})
            if answer.status == 404:
                return [], False
        if answer.status != 200:
            raise self._transport.refusal(doing, answer)
        return self.parse(answer.data, "manifests", doing), own

    def parse(self, data: bytes, key: str, doing: str) -> list[Descriptor]:
        """Read the descriptors of an index (``manifests``) or of a manifest (``layers``).

        Raises:
            ArtifactError: ``ARTIFACT_INVALID``.
        """
        try:
            document = parse_json(data)
            entries = document.get(key) if isinstance(document, dict) else None
            if not isinstance(entries, list) or len(entries) > MOST_DESCRIPTORS:
                raise ValueError(f"it has no list of {key}")  # noqa: TRY301 - as every other fault of the answer
            return [Descriptor.parse(entry) for entry in entries]
        except ValueError as error:
            raise self.invalid(doing, str(error)) from error

    def invalid(self, doing: str, what: str) -> ArtifactError:
        """Return the error for a manifest that is not one."""
        return self._transport.error(doing, what, "ARTIFACT_INVALID")

    def too_large(self, doing: str, what: str) -> ArtifactError:
        """Return the error for what has more bytes than it may."""
        return self._transport.error(doing, what, "LIMIT_EXCEEDED")

    def _call(self, doing: str, method: str, path: str, **options: Any) -> Answer:
        call: Callable[[], Answer] = lambda: self._transport.request(method, self._path + path, **options)  # noqa: E731
        return self._transport.repeat(doing, call)

    def _begin(self, digest: str) -> str:
        """Open an upload; return its address."""
        doing = f"sending {digest[:19]}"
        answer = self._call(doing, "POST", "blobs/uploads/", headers={"Content-Length": "0"})
        if answer.status != 202:
            raise self._transport.refusal(doing, answer)
        return self._next(answer, digest)

    def _next(self, answer: Answer, digest: str) -> str:
        place = answer.headers.get("location", "")
        if not place:
            raise self._transport.error(f"sending {digest[:19]}", "it says no address for the upload", "STORE_INVALID")
        return place

    def _resume(self, place: str, digest: str) -> tuple[str, int]:
        """Return where an upload goes on: its address and the bytes that the registry has; a new upload if it has forgotten it."""
        answer = self._transport.repeat(f"sending {digest[:19]}", lambda: self._transport.request("GET", place))
        received = _RANGE.fullmatch(answer.headers.get("range", ""))
        if answer.status != 204 or received is None:
            return self._begin(digest), 0
        end = int(received[1])
        return answer.headers.get("location") or place, end + 1 if end else 0

    def _finish(self, digest: str, place: str, *, body: bytes = b"") -> None:
        """End an upload; the registry compares the digest."""
        doing = f"sending {digest[:19]}"
        between = "&" if "?" in place else "?"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(body))}
        path = f"{place}{between}digest={digest.replace(':', '%3A')}"
        answer = self._transport.repeat(doing, lambda: self._transport.request("PUT", path, headers=headers, body=body))
        if answer.status == 201 or (answer.status == 404 and self._is_there(digest)):
            return
        if answer.status == 400:
            raise self._transport.error(doing, "it received something else than was sent", "ARTIFACT_CORRUPT")
        raise self._transport.refusal(doing, answer)

    def _is_there(self, digest: str) -> bool:
        """Return whether an earlier request has ended the upload whose answer was lost."""
        return self._call(f"looking for {digest[:19]}", "HEAD", f"blobs/{digest}").status == 200


class _Span:
    """A part of a blob as the body of a request."""

    def __init__(self, read_at: ReadAt, offset: int, length: int, on_bytes: OnBytes) -> None:
        self._read_at, self._start, self._length, self._on_bytes = read_at, offset, length, on_bytes
        self._done = 0

    def rewind(self) -> None:
        """Begin again: the registry asks for authentication first, or the connection broke."""
        self._on_bytes(-self._done)
        self._done = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; less than the span has if a file became shorter, which the registry refuses."""
        left = self._length - self._done
        data = self._read_at(left if size < 0 else min(size, left), self._start + self._done)
        self._done += len(data)
        self._on_bytes(len(data))
        return data

    def __iter__(self) -> Iterator[bytes]:
        while data := self.read(1 << 20):
            yield data


def fallback_tag(digest: str) -> str:
    """Return the tag under which clients keep what refers to a manifest, where the registry does not."""
    return digest.replace(":", "-")
