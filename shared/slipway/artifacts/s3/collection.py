"""Garbage collection of a bucket: mark the blobs that manifests name, sweep old blobs that none names.

It needs no lock. Blobs are listed before manifests are read, so the manifest of every artifact complete by then is seen; a blob
whose manifest comes later was written or touched within the grace period, and is kept. ``keep`` is called after that. Work
that begins to use an artifact later touches it, so each object's age is checked once more before its removal. Work that takes longer
than a grace period has a mark (:mod:`slipway.artifacts.s3.store`); artifacts used since it began count as young.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from minio.commonconfig import ENABLED, Filter
from minio.lifecycleconfig import AbortIncompleteMultipartUpload, LifecycleConfig, Rule

from slipway.artifacts.collection import Collected, blobs_named, shrink
from slipway.artifacts.digests import ACTIONS, BLOBS, MANIFESTS, digest_of, key_of
from slipway.artifacts.s3.client import S3_EXCEPTIONS, S3Bucket, StoredObject
from slipway.artifacts.s3.store import S3Store, oldest_work
from slipway.errors import ArtifactError

_LOOKS = 16
_UNFINISHED_DAYS = 1


def collect_bucket(
    store: S3Store,
    *,
    max_age_seconds: float | None = None,
    max_bytes: int | None = None,
    keep: Callable[[], Collection[str]] = tuple,
    dry_run: bool = False,
) -> Collected:
    """Remove artifacts and the blobs that only they name; several collections at once are safe.

    Args:
        store: The store; nothing younger than its grace period is removed, and nothing used since marked work began.
        max_age_seconds: Remove artifacts not used for this long.
        max_bytes: Then remove the least recently used until the blobs take no more than this.
        keep: Returns the artifacts to keep.
        dry_run: Only report what would be removed.

    Raises:
        ArtifactError: As :meth:`S3Bucket.call`; an error of ``keep``, and nothing was removed.
    """
    bucket, now = store.bucket, time.time()
    blobs = store.listing(BLOBS)
    manifests = store.listing(MANIFESTS)
    with ThreadPoolExecutor(max_workers=_LOOKS) as pool:
        contents = dict(zip(map(_digest, manifests), pool.map(lambda m: _contents(store, m), manifests), strict=True))
    kept = set(keep())
    began = oldest_work(bucket, grace_seconds=store.grace_seconds, now=now)
    # The work did not touch artifacts that were younger than half of the period when it began to use them.
    young = min(now - store.grace_seconds, now if began is None else began - store.grace_seconds / 2)
    old = sorted((m.modified, _digest(m)) for m in manifests if m.modified < young)
    candidates = [(used, digest) for used, digest in old if digest not in kept]
    doomed = [digest for used, digest in candidates if max_age_seconds is not None and now - used > max_age_seconds]
    if max_bytes is not None:
        sizes = {_digest(blob): blob.size_bytes for blob in blobs}
        doomed = shrink([digest for _, digest in candidates], doomed, contents, sizes, max_bytes)
    if not dry_run:
        entries = {_digest(manifest): manifest for manifest in manifests}
        doomed = [_digest(manifest) for manifest in _remove(bucket, [entries[digest] for digest in doomed])]
    named = set().union(*(digests for digest, digests in contents.items() if digest not in set(doomed)))
    swept = [blob for blob in blobs if _digest(blob) not in named and blob.modified < young]
    if not dry_run:
        swept = _remove(bucket, swept)
        _forget_actions(store, set(doomed), before=None if max_age_seconds is None else now - max_age_seconds)
    return Collected(artifacts=tuple(doomed), blobs=len(swept), freed_bytes=sum(blob.size_bytes for blob in swept))


def expire_unfinished_uploads(bucket: S3Bucket) -> bool:
    """Add a lifecycle rule that drops unfinished uploads; other rules of the bucket stay. Return False if the service refuses."""
    name = f"slipway-unfinished-uploads-{bucket.prefix.replace('/', '-')}".rstrip("-")
    try:
        lifecycle = bucket.sdk.get_bucket_lifecycle(bucket.bucket)
        rules = [rule for rule in (lifecycle.rules if lifecycle else []) if rule.rule_id != name]
        rules.append(
            Rule(
                status=ENABLED,
                rule_filter=Filter(prefix=bucket.key("blobs/")),
                rule_id=name,
                abort_incomplete_multipart_upload=AbortIncompleteMultipartUpload(
                    days_after_initiation=_UNFINISHED_DAYS
                ),
            )
        )
        bucket.sdk.set_bucket_lifecycle(bucket.bucket, LifecycleConfig(rules))
    except S3_EXCEPTIONS:  # MinIO has no such rule (it drops them by itself), or the credentials lack the right
        return False
    return True


def _remove(bucket: S3Bucket, entries: list[StoredObject]) -> list[StoredObject]:
    """Remove objects whose age has not changed: one touched meanwhile is in use, or a manifest is about to name it.

    Work in small batches, so that little time passes between check and removal.
    """
    removed: list[StoredObject] = []
    with ThreadPoolExecutor(max_workers=_LOOKS) as pool:
        for start in range(0, len(entries), _LOOKS):
            some = entries[start : start + _LOOKS]
            current = pool.map(lambda entry: bucket.find(entry.key), some)
            still = [old for old, now in zip(some, current, strict=True) if now and now.modified == old.modified]
            bucket.delete(entry.key for entry in still)
            removed += still
    return removed


def _forget_actions(store: S3Store, doomed: set[str], *, before: float | None) -> None:
    """Remove results whose outputs are gone, and those without outputs (precedents) from before a time."""
    bucket = store.bucket
    for entry in store.listing(ACTIONS) if doomed else []:
        result = store.read_result(key_of(entry.key))
        aged = before is not None and entry.modified < before
        if result is not None and (doomed & set(result.outputs.values()) or (not result.outputs and aged)):
            bucket.delete([entry.key])


def _contents(store: S3Store, manifest: StoredObject) -> frozenset[str]:
    try:
        return blobs_named(store.bucket.get(manifest.key), _digest(manifest))
    except ArtifactError as error:
        if error.reason != "ARTIFACT_NOT_FOUND":
            raise
        return frozenset()


def _digest(entry: StoredObject) -> str:
    return digest_of(entry.key)
