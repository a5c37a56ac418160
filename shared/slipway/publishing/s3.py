"""Publish to a bucket: the folder's files as they are, and ``MANIFEST.sha256`` last.

Without its list of checksums, what lies there is not published. So the list is removed before a file of another release is replaced, and
written again at the end. Each object has its digest as metadata: what is there already is not sent again, also after an interruption.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from slipway.distribution import require
from slipway.errors import ArtifactError
from slipway.files.checksums import MANIFEST, parse_checksums
from slipway.publishing.destination import Access, OnWait, Published
from slipway.publishing.publication import PROOF
from slipway.publishing.release import OnBytes, Release, ReleasedFile
from slipway.settings.s3 import parse_s3_url

_REPLACED = ".MANIFEST.replaced"
"""The list of an earlier release, kept until another one is whole, so that what only the earlier had is removed."""


class S3Destination:
    """:class:`~slipway.publishing.destination.Destination` below a prefix of a bucket.

    Args:
        url: ``s3://BUCKET/PREFIX``.
        access: Settings with the service and the credentials.

    Raises:
        ArtifactError: ``STORE_INVALID`` for an address that is none, ``STORE_DENIED`` without credentials.
        ServiceError: ``UNSUPPORTED`` if the extra is not installed.
    """

    by_content = False

    def __init__(self, url: str, access: Access) -> None:
        require("s3", what="publishing to a bucket")
        from slipway.artifacts.s3.client import S3Bucket
        from slipway.artifacts.s3.transfer import workers

        bucket, prefix = parse_s3_url(url)
        self._bucket = S3Bucket(access.settings.s3, bucket, prefix=prefix, patience_seconds=access.patience_seconds)
        self._pool: ThreadPoolExecutor = workers()
        self._earlier: set[str] = set()

    def reach(self) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.reach`.

        Raises:
            ArtifactError: As :meth:`S3Bucket.call`.
        """
        self._bucket.listing(MANIFEST, most=1)

    def begin(self, release: Release) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.begin`.

        Raises:
            ArtifactError: As :meth:`S3Bucket.call`; ``OUTPUT_EXISTS`` for a list of checksums that is none of a delivery.
        """
        before, interrupted = self._read(MANIFEST), self._read(_REPLACED)
        listed = self._parse(before) if before is not None else {}
        self._earlier = set(listed) | set(self._parse(interrupted) if interrupted is not None else {})
        proof = [file for file in release.files if file.path in PROOF]
        if before is None or (listed == release.publication.checksums and all(map(self.has, proof))):
            return
        if interrupted is None:
            self._bucket.put(_REPLACED, before)
        self._bucket.delete([MANIFEST])

    def has(self, file: ReleasedFile, *, on_wait: OnWait = lambda: None) -> bool:
        """As :meth:`~slipway.publishing.destination.Destination.has`."""
        if file.path == MANIFEST:
            return True  # the commit sends it
        there = self._bucket.during(on_wait).find(file.path)
        return there is not None and (there.sha256, there.size_bytes) == (file.sha256, file.size_bytes)

    def send(self, file: ReleasedFile, *, on_bytes: OnBytes) -> int:
        """As :meth:`~slipway.publishing.destination.Destination.send`."""
        from slipway.artifacts.s3.transfer import upload

        bucket = self._bucket.during(lambda: on_bytes(0))
        with file.opened() as opened:
            upload(bucket, file.path, opened, file.size_bytes, pool=self._pool, on_bytes=on_bytes, sha256=file.sha256)
        return file.size_bytes

    def commit(self, release: Release) -> Published:
        """As :meth:`~slipway.publishing.destination.Destination.commit`; first remove what only an earlier release had."""
        now = {file.path for file in release.files}
        self._bucket.delete(({*self._earlier, *PROOF} if self._earlier else set()) - now)
        listed = release.file(MANIFEST)
        self._bucket.put(MANIFEST, listed.read(), sha256=listed.sha256)
        self._bucket.delete([_REPLACED])
        return Published(self._bucket.url)

    def close(self) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.close`."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, name: str) -> bytes | None:
        try:
            return self._bucket.get(name)
        except ArtifactError as error:
            if error.reason != "ARTIFACT_NOT_FOUND":
                raise
            return None

    def _parse(self, content: bytes) -> dict[str, str]:
        try:
            return parse_checksums(content, where=f"{self._bucket.url}/{MANIFEST}")
        except (ArtifactError, UnicodeDecodeError) as error:
            raise ArtifactError(
                f"{self._bucket.url} holds something else: its {MANIFEST} is no list of checksums",
                reason="OUTPUT_EXISTS",
                remedy="publish to another prefix, or remove what is there",
                about={"destination": self._bucket.url},
            ) from error
