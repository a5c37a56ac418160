"""The files below a prefix of a bucket, as an origin."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.transfer import download
from slipway.artifacts.store import OnBytes
from slipway.sources.origins import OnWait, OriginFile


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
