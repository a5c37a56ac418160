"""Garbage collection of a local store: least recently used artifacts first, then blobs that nothing names."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Collection
from dataclasses import dataclass

from slipway.artifacts.local import LocalStore
from slipway.artifacts.manifest import ManifestFile
from slipway.artifacts.names import ACTIONS, BLOBS
from slipway.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection removed, or would remove."""

    artifacts: tuple[str, ...]
    blobs: int
    freed_bytes: int


def collect(
    store: LocalStore,
    *,
    max_age_seconds: float | None = None,
    max_bytes: int | None = None,
    keep: Collection[str] = (),
    dry_run: bool = False,
) -> Collected:
    """Remove artifacts and the blobs that only they had.

    Writers hold the store's lock, so no blob is removed while a manifest that names it is being made.

    Args:
        store: The store to collect.
        max_age_seconds: Remove artifacts not used for this long.
        max_bytes: Then remove the least recently used until the blobs take no more than this.
        keep: Artifacts to leave alone, such as those of running exports.
        dry_run: Only say what would go.
    """
    with store.lock(fcntl.LOCK_EX):
        doomed = _doomed(store, max_age_seconds, max_bytes, keep)
        kept = [digest for digest in store.digests() if digest not in doomed]
        named = {file.digest for digest in kept for file in _files(store, digest)}
        blobs = [path for path in sorted((store.root / BLOBS).glob("??/*")) if f"sha256:{path.name}" not in named]
        freed = sum(path.stat().st_size for path in blobs)
        if not dry_run:
            for digest in doomed:
                store.manifest_path(digest).unlink(missing_ok=True)
            for path in blobs:
                path.unlink(missing_ok=True)
            for path in (store.root / "uploads").iterdir():
                path.unlink(missing_ok=True)
            for path in (store.root / ACTIONS).glob("??/*.json"):
                if store.recorded_action(path.stem) is None:
                    path.unlink(missing_ok=True)
        return Collected(artifacts=tuple(doomed), blobs=len(blobs), freed_bytes=freed)


def _doomed(
    store: LocalStore, max_age_seconds: float | None, max_bytes: int | None, keep: Collection[str]
) -> list[str]:
    """Artifacts to remove, least recently used first."""
    by_use = sorted((store.last_used(digest), digest) for digest in store.digests() if digest not in set(keep))
    now = time.time()
    doomed = [digest for used, digest in by_use if max_age_seconds is not None and now - used > max_age_seconds]
    if max_bytes is not None:
        holders: dict[str, set[str]] = {}
        sizes: dict[str, int] = {}
        for digest in store.digests():
            for file in _files(store, digest):
                holders.setdefault(file.digest, set()).add(digest)
                sizes[file.digest] = file.size_bytes
        gone = set(doomed)
        for _, digest in by_use:
            if sum(size for blob, size in sizes.items() if holders[blob] - gone) <= max_bytes:
                break
            if digest not in gone:
                gone.add(digest)
                doomed.append(digest)
    return doomed


def _files(store: LocalStore, digest: str) -> tuple[ManifestFile, ...]:
    try:
        return store.manifest(digest).files
    except ArtifactError:
        return ()
