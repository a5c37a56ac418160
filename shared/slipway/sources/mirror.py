"""A prefix of a bucket as a folder to look at: every file has its name and size, but only what describes it has content.

Configurations, trainer states and indexes are read, of safetensors the headers. Everything else is a hole of the right
size, so that a run with a hundred checkpoints is listed and checked in seconds, with the code that checks folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from slipway.artifacts import ActionResult, Artifacts
from slipway.artifacts.files import in_threads
from slipway.artifacts.manifest import check_path
from slipway.artifacts.s3_client import S3Bucket, StoredObject
from slipway.artifacts.s3_transfer import download, workers
from slipway.artifacts.store import OnBytes
from slipway.errors import ArtifactError

_READ = ("config.json", "generation_config.json", "adapter_config.json", "trainer_state.json", ".index.json")
_LARGEST_READ = 64 << 20
_FIRST_BYTES = 64 << 10  # holds the header of most adapters, so that one request is enough


class BucketMirror:
    """What lies below a prefix, looked at in a local folder.

    Args:
        bucket: Bucket and prefix.
        folder: New folder for the mirror.

    Raises:
        ArtifactError: ``SOURCE_NOT_FOUND`` when nothing is there; ``ARTIFACT_INVALID`` for a key that could leave the folder; and as
            :meth:`S3Bucket.call`.
    """

    def __init__(self, bucket: S3Bucket, folder: Path) -> None:
        self._bucket, self.folder = bucket, folder
        self._objects = {entry.key: entry for entry in bucket.listing() if not entry.key.endswith("/")}
        if not self._objects:
            raise ArtifactError(
                f"nothing lies below {bucket.url}",
                reason="SOURCE_NOT_FOUND",
                remedy="check bucket and prefix, and AWS_ENDPOINT_URL",
                about={"source": bucket.url},
            )
        for key in self._objects:
            check_path(key)
        for key in self._objects:
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
        in_threads(self._look, self._objects.values(), None)

    def put(self, files: Mapping[str, Path], store: Artifacts, *, scratch: Path, on_bytes: OnBytes) -> str:
        """Store files of the mirror with their content; answers the digest.

        The same objects are not read again: the store knows by their entity tags what they became.

        Raises:
            ArtifactError: ``FILE_ERROR`` when an object was replaced since it was listed; as :meth:`S3Bucket.call` and the store's ``put``.
        """
        objects = {name: self._objects[path.relative_to(self.folder).as_posix()] for name, path in files.items()}
        described = [[name, entry.key, entry.etag, entry.size_bytes] for name, entry in sorted(objects.items())]
        document = {"source": self._bucket.where, "objects": described}
        key = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        known = store.action(key)
        if known is not None and "source" in known.outputs:
            return known.outputs["source"]
        with workers() as pool:

            def fetch(item: tuple[str, StoredObject], count: OnBytes) -> None:
                name, entry = item
                path = scratch / name
                path.parent.mkdir(parents=True, exist_ok=True)
                bucket = self._bucket.during(lambda: count(0))
                download(bucket, entry.key, entry.size_bytes, path, pool=pool, on_bytes=count)
                found = bucket.find(entry.key)
                if found is None or (found.etag, found.size_bytes) != (entry.etag, entry.size_bytes):
                    raise _changed(f"{bucket.url}/{entry.key}")

            in_threads(fetch, objects.items(), on_bytes)
        digest = store.put(scratch)
        store.record_action(key, ActionResult({"source": digest}))
        return digest

    def _look(self, entry: StoredObject, count: OnBytes) -> None:
        bucket = self._bucket.during(lambda: count(0))
        path = self.folder / entry.key
        head = b""
        if path.name.endswith(_READ) and entry.size_bytes <= _LARGEST_READ:
            head = bucket.get(entry.key) if entry.size_bytes else b""
        elif path.suffix == ".safetensors" and entry.size_bytes:
            head = bucket.get_range(entry.key, 0, _FIRST_BYTES)
            needed = min(8 + int.from_bytes(head[:8], "little"), entry.size_bytes, _LARGEST_READ)
            if needed > len(head):
                head += bucket.get_range(entry.key, len(head), needed - len(head))
        with path.open("xb") as file:
            file.write(head)
            file.truncate(entry.size_bytes)


def _changed(url: str) -> ArtifactError:
    return ArtifactError(
        f"{url} was replaced or removed while it was being read",
        reason="FILE_ERROR",
        remedy="try again when nothing writes there any more",
        about={"source": url},
    )
