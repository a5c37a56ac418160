"""The interface of an artifact store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from slipway.artifacts.actions import ActionResult
from slipway.artifacts.manifest import Manifest

OnBytes = Callable[[int], None]
Known = Mapping[Path, str]
"""Digests of files, computed by their writer. A store trusts them; readers verify every blob."""
NOTHING_KNOWN: Known = MappingProxyType({})


class Artifacts(Protocol):
    """Artifacts by digest and results by action key. Every method may be called from several processes at once."""

    @property
    def where(self) -> str:
        """Address of the store, for people."""
        ...

    def put(self, folder: Path, *, known: Known = NOTHING_KNOWN, on_bytes: OnBytes | None = None) -> str:
        """Commit a folder that the caller gives up; return the artifact's digest. Files with a ``known`` digest are not read."""
        ...

    def put_files(self, files: Mapping[str, Path], *, on_bytes: OnBytes | None = None) -> str:
        """Commit files that stay their owner's, given as real paths by path inside the artifact; return the artifact's digest."""
        ...

    def fetch(self, digest: str, target: Path, *, on_bytes: OnBytes | None = None) -> Path:
        """Write an artifact's verified files below ``target``, which must not exist; return ``target``."""
        ...

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of an artifact."""
        ...

    def exists(self, digest: str) -> bool:
        """Return whether the store has an artifact's manifest and all its blobs, with the right sizes."""
        ...

    def digests(self) -> list[str]:
        """Return the digests of all artifacts, sorted."""
        ...

    def action(self, key: str) -> ActionResult | None:
        """Return the result recorded under an action key, if all its outputs still exist."""
        ...

    def record_action(self, key: str, result: ActionResult) -> None:
        """Record a result under its action key."""
        ...


class ArtifactStore(Artifacts, Protocol):
    """The whole interface of a store: for workers, and for its garbage collection."""

    def last_used(self, digest: str) -> float:
        """Return when an artifact was last made, fetched or reused, in seconds since the epoch; stores may round."""
        ...

    def size_bytes(self) -> int:
        """Return the total size of all blobs."""
        ...

    def results(self) -> Iterator[ActionResult]:
        """Return all recorded results, whether or not their outputs still exist."""
        ...

    def using(self) -> AbstractContextManager[None]:
        """Mark that work is running: nothing it stores, fetches or reuses is collected before the context ends."""
        ...

    def under_way(self) -> frozenset[str]:
        """Return digests of artifacts that running work may still need; a collection must keep them."""
        ...
