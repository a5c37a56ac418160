"""What Slipway asks of an artifact store."""

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
"""Digests of files that whoever wrote them computed meanwhile. A store believes them; readers verify every blob."""
NOTHING_KNOWN: Known = MappingProxyType({})


class Artifacts(Protocol):
    """Artifacts by digest and results by action key. Every method may be called from several processes at once."""

    @property
    def where(self) -> str:
        """Where it is, for people."""
        ...

    def put(self, folder: Path, *, known: Known = NOTHING_KNOWN, on_bytes: OnBytes | None = None) -> str:
        """Commit a folder that the caller gives up; answers the artifact's digest. Files that are ``known`` are not read."""
        ...

    def put_files(self, files: Mapping[str, Path], *, on_bytes: OnBytes | None = None) -> str:
        """Commit somebody else's files, given as real paths by their path inside the artifact; answers the artifact's digest."""
        ...

    def fetch(self, digest: str, target: Path, *, on_bytes: OnBytes | None = None) -> Path:
        """Lay an artifact's verified files below ``target``, which must not exist; answers ``target``."""
        ...

    def manifest(self, digest: str) -> Manifest:
        """The files of an artifact."""
        ...

    def exists(self, digest: str) -> bool:
        """Whether an artifact is complete: its manifest and every blob are there with their sizes."""
        ...

    def digests(self) -> list[str]:
        """Digests of all artifacts, sorted."""
        ...

    def action(self, key: str) -> ActionResult | None:
        """The result recorded under an action key, if all its outputs still exist."""
        ...

    def record_action(self, key: str, result: ActionResult) -> None:
        """Remember a result under its action key."""
        ...


class ArtifactStore(Artifacts, Protocol):
    """All of a store: what workers use, and what looks after it."""

    def last_used(self, digest: str) -> float:
        """When an artifact was last made, fetched or reused, in seconds since the epoch; stores may round."""
        ...

    def size_bytes(self) -> int:
        """Bytes of all blobs."""
        ...

    def results(self) -> Iterator[ActionResult]:
        """All recorded results, whether or not their outputs still exist."""
        ...

    def using(self) -> AbstractContextManager[None]:
        """Mark that work is under way: what it stores, fetches or reuses is not collected before the context ends."""
        ...

    def under_way(self) -> frozenset[str]:
        """Digests of artifacts that marked work may be about to name; for a collection, before it removes anything."""
        ...
