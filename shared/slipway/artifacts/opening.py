"""Open the store that the settings name, and get file-by-file access to a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipway.artifacts.blobs import Blobs, LocalBlobs
from slipway.artifacts.local import LocalStore
from slipway.artifacts.store import ArtifactStore
from slipway.distribution import require
from slipway.observability import metrics
from slipway.settings import Settings
from slipway.settings.s3 import SCHEME, parse_s3_url


def open_store(settings: Settings) -> ArtifactStore:
    """Open the artifact store of this process: a local folder, or a bucket behind a cache on this machine.

    Raises:
        ArtifactError: ``STORE_INVALID`` or ``STORE_DENIED``; an unavailable bucket fails only at its first use.
        ServiceError: ``UNSUPPORTED`` when the extra for buckets is not installed.
    """
    if not settings.store.startswith(SCHEME):
        return LocalStore(Path(settings.store) if settings.store else settings.store_path)
    bucket, prefix = parse_s3_url(settings.store)
    require("s3", what=f"the store {settings.store}")
    from slipway.artifacts.cached import CachedStore
    from slipway.artifacts.s3.client import S3Bucket
    from slipway.artifacts.s3.store import S3Store

    remote = S3Store(S3Bucket(settings.s3, bucket, prefix=prefix))
    return CachedStore(remote, LocalStore(settings.cache_path), max_bytes=settings.cache_bytes)


def blobs_of(store: ArtifactStore) -> Blobs:
    """Return file-by-file access to a store; for one behind a cache, to the remote store alone."""
    if isinstance(store, LocalStore):
        return LocalBlobs(store)
    from slipway.artifacts.cached import CachedStore
    from slipway.artifacts.s3.blobs import S3Blobs

    assert isinstance(store, CachedStore)
    return S3Blobs(store.remote)


def cache_of(store: ArtifactStore) -> LocalStore | None:
    """Return the cache of a store on this machine; None for a store without one."""
    if isinstance(store, LocalStore):
        return None
    from slipway.artifacts.cached import CachedStore

    return store.local if isinstance(store, CachedStore) else None


def cache_size(settings: Settings) -> Iterator[metrics.Sample]:
    """Yield the size of this node's cache if the store has one, for :func:`slipway.observability.metrics.reading`."""
    if settings.store.startswith(SCHEME):
        yield metrics.NODE_CACHE_BYTES, {}, LocalStore(settings.cache_path).size_bytes()
