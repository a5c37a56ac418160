"""Garbage collection of a local store: remove the least recently used artifacts, then blobs that no manifest names.

Unknown content is kept: every digest in a manifest of another version counts as named.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from slipway.artifacts.digests import ACTIONS, BLOBS, digest_bytes, digest_of, key_of
from slipway.artifacts.local import LocalStore
from slipway.artifacts.manifest import Manifest
from slipway.errors import ArtifactError

_DIGESTS = re.compile(rb"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Collected:
    """Artifacts and blobs that a collection removed, or would remove."""

    artifacts: tuple[str, ...]
    blobs: int
    freed_bytes: int


def collect(
    store: LocalStore,
    *,
    max_age_seconds: float | None = None,
    max_bytes: int | None = None,
    keep: Callable[[], Collection[str]] = tuple,
    dry_run: bool = False,
) -> Collected:
    """Remove artifacts and the blobs that only they name.

    Writers hold the store's lock, so no blob is removed while a manifest that names it is being made, and nothing is stored or
    used between the call of ``keep`` and the removal.

    Args:
        store: The store to collect.
        max_age_seconds: Remove artifacts not used for this long.
        max_bytes: Then remove the least recently used until the blobs take no more than this.
        keep: Returns the artifacts to keep, such as those of running exports; called while nothing can be written.
        dry_run: Only report what would be removed.

    Raises:
        OSError: A folder of the store cannot be read.
        ModelExportError: An error of ``keep``; nothing was removed.
    """
    with store.lock(fcntl.LOCK_EX):
        kept = set(keep())
        contents = {digest: _contents(store, digest) for digest in store.digests()}
        sizes = {digest_of(path.name): path.lstat().st_size for path in store.listing(BLOBS)}
        doomed = _choose_doomed(store, contents, sizes, kept, max_age_seconds=max_age_seconds, max_bytes=max_bytes)
        named = set().union(*(blobs for digest, blobs in contents.items() if digest not in set(doomed)))
        blobs = [digest for digest in sizes if digest not in named]
        if not dry_run:
            for digest in doomed:
                store.manifest_path(digest).unlink(missing_ok=True)
            for digest in blobs:
                store.blob_path(digest).unlink(missing_ok=True)
            for path in (store.root / "uploads").iterdir():
                if not path.is_dir():
                    path.unlink(missing_ok=True)
            for path in store.listing(ACTIONS):
                result = store.recorded_action(key_of(path.name))
                # A result without outputs is a precedent. It has no use to go by, only its own age.
                aged = max_age_seconds is not None and time.time() - path.lstat().st_mtime > max_age_seconds
                if result is None or (not result.outputs and aged):
                    path.unlink(missing_ok=True)
        return Collected(artifacts=tuple(doomed), blobs=len(blobs), freed_bytes=sum(map(sizes.__getitem__, blobs)))


def blobs_named(data: bytes, digest: str) -> frozenset[str]:
    """Return the digests of the blobs named by stored manifest bytes; none if they do not have the digest."""
    if digest_bytes(data) != digest:
        return frozenset()
    try:
        return frozenset(file.digest for file in Manifest.from_bytes(data).files)
    except ArtifactError:  # written by another version
        return frozenset(name.decode() for name in _DIGESTS.findall(data))


def _contents(store: LocalStore, digest: str) -> frozenset[str]:
    try:
        return blobs_named(store.manifest_bytes(digest), digest)
    except ArtifactError as error:
        if error.reason != "ARTIFACT_NOT_FOUND":
            raise
        return frozenset()


def _choose_doomed(
    store: LocalStore,
    contents: Mapping[str, frozenset[str]],
    sizes: Mapping[str, int],
    keep: Collection[str],
    *,
    max_age_seconds: float | None,
    max_bytes: int | None,
) -> list[str]:
    """Return the artifacts to remove, least recently used first."""
    by_use = sorted((store.last_used(digest), digest) for digest in contents if digest not in keep)
    now = time.time()
    doomed = [digest for used, digest in by_use if max_age_seconds is not None and now - used > max_age_seconds]
    return doomed if max_bytes is None else shrink([digest for _, digest in by_use], doomed, contents, sizes, max_bytes)


def shrink(
    candidates: Collection[str],
    doomed: Collection[str],
    contents: Mapping[str, Collection[str]],
    sizes: Mapping[str, int],
    most: int,
) -> list[str]:
    """Return ``doomed`` and further candidates, until the blobs still named take no more than ``most`` bytes."""
    result, gone = list(doomed), set(doomed)
    holders = Counter(blob for digest, blobs in contents.items() if digest not in gone for blob in blobs)
    total = sum(sizes.get(blob, 0) for blob in holders)
    for digest in candidates:
        if total <= most:
            break
        if digest in gone:
            continue
        result.append(digest)
        for blob in contents[digest]:
            holders[blob] -= 1
            if not holders[blob]:
                total -= sizes.get(blob, 0)
    return result
