"""One bucket of an S3 service through the ``minio`` SDK: calls with retries; its errors become ``ArtifactError``.

Calls are retried for a while when the service is unavailable. Other errors come with a remedy.
"""

from __future__ import annotations

import copy
import io
import itertools
import logging
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urlsplit
from xml.etree.ElementTree import ParseError

import certifi
import urllib3
from minio import Minio
from minio.commonconfig import REPLACE, CopySource
from minio.deleteobjects import DeleteObject
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from urllib3.exceptions import HTTPError, MaxRetryError, SSLError

from slipway.artifacts.s3.credentials import connections, credentials
from slipway.backoff import Backoff
from slipway.errors import ArtifactError
from slipway.files.json_documents import LARGEST_LIST
from slipway.observability import metrics
from slipway.settings.s3 import S3Options
from slipway.texts import quoted

#: Everything a call of the SDK raises for a fault of the service or the network. (ParseError: a response was cut short.)
S3_EXCEPTIONS = (MinioException, HTTPError, ConnectionError, TimeoutError, ParseError)
MISSING = frozenset({"NoSuchKey", "NoSuchObject", "ResourceNotFound", "NoSuchVersion", "NoSuchUpload"})
_BUSY = frozenset(
    {"InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown", "XMinioServerNotInitialized"}
)  # fmt: skip
_BUSY_STATUS = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_DENIED = frozenset(
    {"AccessDenied", "AuthorizationHeaderMalformed", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken",
     "RequestTimeTooSkewed", "SignatureDoesNotMatch"}
)  # fmt: skip
_FULL = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"})

log = logging.getLogger("slipway.store")

OnWait = Callable[[], None]
Metadata = dict[str, str | list[str] | tuple[str]]
SHA256 = "sha256"
"""Name of the metadata with an object's digest in hexadecimal."""
_T = TypeVar("_T")

WORKERS = 4
"""Concurrent requests that carry data. Each has one part in memory, so this bounds the memory of a transfer."""
PATIENCE_SECONDS = 60.0
_DELETES_A_CALL = 500

# Detect within seconds that the other end of a connection has gone.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_SOCKET_OPTIONS = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in _KEEPALIVE.items()
        if hasattr(socket, name)
    ),
]


def is_missing(error: BaseException) -> bool:
    """Return whether the service reported a missing object."""
    return isinstance(error, S3Error) and error.code in MISSING


def is_passing(error: BaseException) -> bool:
    """Return whether the same call may succeed a little later."""
    match error:
        case S3Error():
            return error.code in _BUSY or _is_passing_status(error.response.status)
        case ServerError():
            return _is_passing_status(error.status_code)
        case InvalidResponseError():
            return _is_passing_status(error._code)
        case MaxRetryError():
            return not isinstance(error.reason, SSLError)
        case SSLError():
            return False
    return isinstance(error, HTTPError | ConnectionError | TimeoutError | ParseError)


def _is_passing_status(status: int) -> bool:
    return status in _BUSY_STATUS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def store_error(error: BaseException, doing: str, where: str) -> ArtifactError:
    """Return the error for a call that failed permanently."""
    about = {"store": where}
    code = error.code if isinstance(error, S3Error) else type(error).__name__
    what = f"{doing}: the store {where} answers {code}"
    if is_missing(error):
        return ArtifactError(what, reason="ARTIFACT_NOT_FOUND", about=about)
    if code in _DENIED or (isinstance(error, S3Error) and error.response.status == 403):
        remedy = "check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and their rights on the bucket"
        return ArtifactError(what, reason="STORE_DENIED", remedy=remedy, about=about)
    if code == "NoSuchBucket":
        remedy = "create the bucket, or correct its name"
        return ArtifactError(what, reason="STORE_INVALID", remedy=remedy, about=about)
    if code in _FULL:
        remedy = "free space in the bucket with slipway cache gc, or raise its quota"
        return ArtifactError(what, reason="DISK_FULL", remedy=remedy, about=about)
    if is_passing(error):
        remedy = "check that it runs and can be reached, then try again"
        return ArtifactError(f"{what} ({_cause(error)})", reason="STORE_UNAVAILABLE", remedy=remedy, about=about)
    remedy = "check the endpoint (AWS_ENDPOINT_URL; http:// for one without TLS), the region and the certificates"
    return ArtifactError(f"{what} ({_cause(error)})", reason="STORE_INVALID", remedy=remedy, about=about)


def _cause(error: BaseException) -> str:
    """Return the innermost message: urllib3 wraps errors and repeats URLs, which do not help the reader."""
    if isinstance(error, MaxRetryError) and error.reason is not None:
        error = error.reason
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object: its key, size, entity tag, when it was last written, in seconds since the epoch, and its SHA-256 if its metadata has it."""

    key: str
    size_bytes: int
    etag: str
    modified: float
    sha256: str = ""


class S3Bucket:
    """A bucket, or the part of it below a prefix; keys are relative to the prefix.

    Args:
        options: The service and the credentials.
        bucket: Name of the bucket, which must exist.
        prefix: Without slashes at its ends; may be empty.
        patience_seconds: How long a call is retried while the service is unavailable.

    Raises:
        ArtifactError: ``STORE_DENIED`` if there are no credentials, ``STORE_INVALID`` if the endpoint is not an address.
    """

    def __init__(
        self, options: S3Options, bucket: str, *, prefix: str = "", patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.where = f"{self.url} at {options.endpoint}"
        self._patience = patience_seconds
        self._on_wait: OnWait | None = None
        self.sdk = _connect(options)
        self._options = options
        self._signers: dict[str, Minio] = {}

    def key(self, name: str) -> str:
        """Return the full key of a name."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def signed_address(self, name: str, endpoint: str, seconds: int) -> str:
        """Return an address at which anyone may read an object for so long; nothing is asked of the service.

        Args:
            name: The object.
            endpoint: Where the service is reached, which the signature holds for.
            seconds: How long the address is valid; credentials that end earlier end it.

        Raises:
            ArtifactError: ``STORE_INVALID`` if the endpoint is no address; ``STORE_DENIED`` without credentials.
        """
        if endpoint not in self._signers:
            self._signers[endpoint] = _connect(self._options.model_copy(update={"endpoint": endpoint}))
        signer = self._signers[endpoint]
        return self.call(
            f"signing an address of {name}",
            lambda: signer.presigned_get_object(self.bucket, self.key(name), expires=timedelta(seconds=seconds)),
        )

    def during(self, on_wait: OnWait) -> S3Bucket:
        """Return the same bucket with calls that can be stopped: they call ``on_wait`` between attempts, and it may raise."""
        watched = copy.copy(self)
        watched._on_wait = on_wait
        return watched

    def call(self, doing: str, request: Callable[[], _T]) -> _T:
        """Make a call; retry while it fails for a temporary reason.

        Args:
            doing: What the call does, for messages; its first word, a verb, is the operation in the metrics.
            request: The call; it must be safe to repeat.

        Raises:
            ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``, ``ARTIFACT_NOT_FOUND`` or ``DISK_FULL``.
        """
        backoff: Backoff | None = None
        warned = False
        operation = doing.partition(" ")[0]
        while True:
            try:
                answer = request()
            except S3_EXCEPTIONS as error:
                backoff = backoff or self.backoff()
                final = not is_passing(error) or backoff.is_over()
                outcome = "missing" if is_missing(error) else "failed" if final else "retried"
                metrics.STORE_REQUESTS.add(operation=operation, outcome=outcome)
                if final:
                    raise store_error(error, doing, self.where) from error
                if not warned and backoff.pause > 1:  # single failures are common; warn only about longer ones
                    warned = True
                    log.warning(f"{doing}: {self.where} does not answer, retrying for {self._patience:.0f} s")
            else:
                metrics.STORE_REQUESTS.add(operation=operation, outcome="ok")
                return answer
            backoff.wait()

    def backoff(self) -> Backoff:
        """Return the pauses of one piece of work that is repeated while the service is unavailable."""
        return Backoff(self._patience, self._wait)

    def get(self, name: str) -> bytes:
        """Return the content of a small object.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``; ``ARTIFACT_INVALID`` for more than :data:`LARGEST_LIST` bytes, which the store
                never writes; and as :meth:`call`.
        """
        data = self.get_range(name, 0, 0, most=LARGEST_LIST + 1)
        if len(data) > LARGEST_LIST:
            raise ArtifactError(
                f"{name} in {self.where} has more than {LARGEST_LIST} bytes",
                reason="ARTIFACT_INVALID",
                remedy="remove it: Slipway did not write it",
            )
        return data

    def get_range(self, name: str, offset: int, length: int, *, most: int | None = None) -> bytes:
        """Return ``length`` bytes of an object from ``offset``, fewer at its end or over ``most``; all the rest if ``length`` is 0."""

        def request() -> bytes:
            response = self.sdk.get_object(self.bucket, self.key(name), offset=offset, length=length)
            try:
                return bytes(response.read(most))
            finally:
                response.close() if response.length_remaining else response.release_conn()

        data = self.call(f"reading {name}", request)
        metrics.STORE_BYTES.add(len(data), direction="received")
        return data

    def put(self, name: str, data: bytes, *, sha256: str = "") -> None:
        """Write an object atomically; ``sha256`` becomes its metadata, which :meth:`find` returns."""
        metadata: Metadata | None = {SHA256: sha256} if sha256 else None
        self.call(
            f"writing {name}",
            lambda: self.sdk.put_object(
                self.bucket, self.key(name), io.BytesIO(data), len(data), part_size=5 << 30, metadata=metadata
            ),
        )
        metrics.STORE_BYTES.add(len(data), direction="sent")

    def find(self, name: str) -> StoredObject | None:
        """Return an object's size and age, or None if there is none."""

        def request() -> StoredObject | None:
            try:
                info = self.sdk.stat_object(self.bucket, self.key(name))
            except S3_EXCEPTIONS as error:
                if is_missing(error):
                    return None
                raise
            sha256 = (info.metadata or {}).get(f"x-amz-meta-{SHA256}", "")
            return StoredObject(name, info.size or 0, info.etag or "", _seconds(info.last_modified), sha256)

        return self.call(f"looking for {name}", request)

    def listing(self, below: str = "", *, most: int | None = None) -> list[StoredObject]:
        """Return the objects whose name begins with ``below``, sorted by name; at most the first ``most``."""
        start = len(self.key(""))

        def request() -> list[StoredObject]:
            return [
                StoredObject(
                    entry.object_name[start:],
                    entry.size or 0,
                    (entry.etag or "").strip('"'),
                    _seconds(entry.last_modified),
                )
                for entry in itertools.islice(
                    self.sdk.list_objects(self.bucket, prefix=self.key(below), recursive=True), most
                )
                if entry.object_name and not entry.is_dir
            ]

        return sorted(self.call(f"listing {below or 'everything'}", request), key=lambda entry: entry.key)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are not an error."""
        ordered = sorted(names)
        for start in range(0, len(ordered), _DELETES_A_CALL):
            doomed = [DeleteObject(self.key(name)) for name in ordered[start : start + _DELETES_A_CALL]]

            def request(doomed: list[DeleteObject] = doomed) -> list[str]:
                return [f"{error.name}: {error.code}" for error in self.sdk.remove_objects(self.bucket, doomed)]

            refused = self.call("removing objects", request)
            if refused:
                raise ArtifactError(
                    f"the store {self.where} refused to remove {len(refused)} objects, first {refused[0]}",
                    reason="STORE_DENIED",
                    remedy="give the credentials s3:DeleteObject",
                )

    def touch(self, name: str) -> None:
        """Reset an object's age in place; its content stays."""
        source = CopySource(self.bucket, self.key(name))
        metadata: Metadata = {"used": str(int(time.time()))}
        self.call(
            f"touching {name}",
            lambda: self.sdk.copy_object(
                self.bucket, self.key(name), source, metadata=metadata, metadata_directive=REPLACE
            ),
        )

    def _wait(self, seconds: float) -> None:
        """Sleep in short pieces, so that a cancelled transfer ends soon."""
        end = time.monotonic() + seconds
        while True:
            if self._on_wait is not None:
                self._on_wait()
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.25))


def _connect(options: S3Options) -> Minio:
    shown = quoted(options.endpoint.rpartition("@")[2])  # without a password
    try:
        parts = urlsplit(options.endpoint)
    except ValueError as error:
        raise _address_error(f"{shown}: {error}") from error
    odd = parts.path.strip("/") or "@" in parts.netloc or re.search(r"\s", parts.netloc)
    if parts.scheme not in {"http", "https"} or not parts.hostname or odd:
        raise _address_error(shown)
    ca_file = options.ca_file or certifi.where()
    http = urllib3.PoolManager(
        timeout=urllib3.Timeout(connect=10, read=60),
        maxsize=2 * WORKERS,
        socket_options=_SOCKET_OPTIONS,
        retries=False,
        cert_reqs="CERT_REQUIRED",
        ca_certs=ca_file,
    )
    provider = credentials(options, connections(ca_file))
    try:
        return Minio(
            parts.netloc,
            secure=parts.scheme == "https",
            region=options.region,
            http_client=http,
            credentials=provider,
        )
    except ValueError as error:
        raise _address_error(f"{options.endpoint} (region {options.region!r}): {error}") from error


def _address_error(what: str) -> ArtifactError:
    return ArtifactError(
        f"the S3 endpoint is not an address: {what}",
        reason="STORE_INVALID",
        remedy="set AWS_ENDPOINT_URL to http(s)://host[:port]",
    )


def _seconds(time: datetime | None) -> float:
    """Return whole seconds: MinIO gives milliseconds in lists, but only seconds for a single object."""
    return float(int(time.timestamp())) if time else 0.0
