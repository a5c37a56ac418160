"""The interface of an artifact store, the results that it keeps, and their action keys.

An action key is a hash of everything that decides a stage's result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

from slipway.artifacts.digests import is_digest
from slipway.artifacts.manifest import Manifest, ManifestFile
from slipway.files.json_documents import parse_json
from slipway.stage import Stage, StageParams

_MOST_VALUES = 1 << 22

OnBytes = Callable[[int], None]
Known = Mapping[Path, str]
"""Digests of files, computed by their writer. A store trusts them; readers verify every blob."""
NOTHING_KNOWN: Known = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ActionResult:
    """Result of a stage: the digest of each output by name, and the facts it recorded."""

    outputs: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the bytes that a store keeps."""
        return json.dumps({"outputs": self.outputs, "facts": self.facts}, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """Read the bytes that a store kept; return None if they are damaged."""
        try:
            document = parse_json(data, most_values=_MOST_VALUES, lenient=True)
            outputs, facts = document["outputs"], document["facts"]
        except (ValueError, KeyError, TypeError):
            return None
        if not isinstance(outputs, dict) or not isinstance(facts, dict):
            return None
        right = all(isinstance(digest, str) and is_digest(digest) for digest in outputs.values())
        return cls(outputs=outputs, facts=facts) if right else None


def action_key(stage: Stage[Any], inputs: Mapping[str, str], params: StageParams, *, gpu_architecture: str = "") -> str:
    """Return the key of a result before it is made, as 64 hexadecimal digits.

    Args:
        stage: The stage; its name, version and the versions of its libraries are part of the key.
        inputs: Digest of each input by name.
        params: Validated parameters.
        gpu_architecture: For example ``sm89``; used only for stages whose output depends on it.
    """
    document = {
        "stage": stage.name,
        "version": stage.version,
        "inputs": dict(inputs),
        "params": params.model_dump(mode="json"),
        "libraries": stage.library_versions(),
        "gpu_architecture": gpu_architecture if stage.hardware.device_bound else "",
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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

    def put(
        self,
        folder: Path,
        *,
        known: Known = NOTHING_KNOWN,
        adopted: Collection[ManifestFile] = (),
        on_bytes: OnBytes | None = None,
    ) -> str:
        """As :meth:`Artifacts.put`; ``adopted`` are further files of the artifact, whose content the store has already."""
        ...

    def fetch(
        self, digest: str, target: Path, *, leave_out: Collection[str] = (), on_bytes: OnBytes | None = None
    ) -> Path:
        """As :meth:`Artifacts.fetch`, without the files whose paths match a pattern in ``leave_out``."""
        ...

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
