"""Do the work of the artifact commands, and name artifacts for people: by the exports that made or used them, or by their files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.artifacts import Artifacts, ArtifactStore, LocalStore
from slipway.artifacts.collection import Collected, collect
from slipway.artifacts.files import folder_files, pull
from slipway.artifacts.opening import open_store
from slipway.cli.artifacts.view import Show
from slipway.cli.connection import Connection
from slipway.distribution import require
from slipway.errors import ArtifactError, ConfigurationError
from slipway.exporting.verification import whole_digest
from slipway.files.checksums import without_checksums
from slipway.files.paths import check_local
from slipway.files.work_folders import UNUSED_SECONDS, remove_unused
from slipway.formats.registry import runtimes_to_try
from slipway.settings import Settings
from slipway.settings.problems import size_of
from slipway.texts import one_line
from slipway_protos.v1 import export_pb2 as pb

if TYPE_CHECKING:
    from slipway.embedded.local_exports import LocalExport


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

_CONTENTS = (("adapter_config.json", "adapter"), ("validation.json", "validation"))
"""Name by a characteristic file; files of formats are checked after these."""


def push_folder(folder: Path, store: Artifacts, *, show: Show) -> dict[str, Any]:
    """Store a copy of a folder's files; return digest, number of files and size.

    Args:
        folder: The folder.
        store: The store.
        show: Shows the progress.

    Raises:
        ArtifactError: ``FILE_ERROR`` if it is not a folder or has no files; errors of the store.
    """
    files = without_checksums(folder_files(folder))
    digest = store.put_files(files, on_bytes=show(sum(path.stat().st_size for path in files.values())))
    return {"digest": digest, "files": len(files), "size_bytes": store.manifest(digest).size_bytes}


def pull_artifact(digest: str, folder: Path, store: Artifacts, *, show: Show) -> dict[str, Any]:
    """Write an artifact's files into a new folder, either all or none; ``show`` is as in :func:`push_folder`.

    Raises:
        ArtifactError: ``OUTPUT_EXISTS``, ``ARTIFACT_NOT_FOUND``, ``ARTIFACT_CORRUPT``.
        ConfigurationError: The folder is an address.
    """
    check_local(folder, named_by="FOLDER")
    digest = whole_digest(digest, store.digests)
    manifest = store.manifest(digest)
    pull(store, digest, folder, on_bytes=show(manifest.size_bytes))
    return {"digest": digest, "folder": str(folder.resolve()), "files": len(manifest.files)}


def list_cache() -> dict[str, Any]:
    """List artifacts, most recently used first, with a readable name and the outputs of stages that they are."""
    settings = Settings.from_environment(os.environ)
    store = open_store(settings)
    makers, names = _makers(store), _names_by_local_exports(settings)
    artifacts = []
    for digest in store.digests():
        try:
            manifest, used = store.manifest(digest), store.last_used(digest)
        except ArtifactError:  # collected meanwhile
            continue
        made_by = makers.get(digest, [])
        artifacts.append(
            {
                "digest": digest,
                "name": names.get(digest) or content_name([file.path for file in manifest.files], made_by),
                "files": len(manifest.files),
                "size_bytes": manifest.size_bytes,
                "last_used": used,
                "complete": store.exists(digest),
                "made_by": made_by,
            }
        )
    artifacts.sort(key=lambda entry: (-float(str(entry["last_used"])), entry["digest"]))
    return {"store": store.where, "artifacts": artifacts, "blob_bytes": store.size_bytes()}


def collect_cache(
    connection: Connection, *, older_than: str | None, max_size: str | None, dry_run: bool
) -> dict[str, Any]:
    """Remove artifacts beyond the limits, and old files that interrupted stages kept on this machine for another attempt.

    Artifacts that an unfinished export uses, or that a project of the named coordinator has, are never removed.

    Raises:
        ConfigurationError: A limit is not an age or a size.
        ModelExportError: The state of an export cannot be read, or the named coordinator does not say what to keep.
            Nothing was removed in this case.
    """
    settings = connection.settings()
    store = open_store(settings)

    def in_use() -> frozenset[str]:
        digests = _used_by_local_exports(settings) | store.under_way()
        if connection.coordinator:
            with connection.client() as client:
                digests |= set(client.list_artifacts(project="-"))
        return digests

    seconds = None if older_than is None else age(older_than)
    done = _collect(
        store,
        in_use,
        max_age_seconds=seconds,
        max_bytes=None if max_size is None else size_of("--max-size", max_size),
        dry_run=dry_run,
    )
    kept = remove_unused(
        settings.scratch, seconds=UNUSED_SECONDS if seconds is None else min(seconds, UNUSED_SECONDS), dry_run=dry_run
    )
    return {
        "store": store.where,
        "dry_run": dry_run,
        "artifacts": list(done.artifacts),
        "blobs": done.blobs,
        "kept": sorted(kept),
        "freed_bytes": done.freed_bytes + sum(kept.values()),
    }


def age(text: str) -> float:
    """Parse an age such as ``90s``, ``15m``, ``12h``, ``30d`` or ``2w``; return seconds.

    Raises:
        ConfigurationError: The text is not an age.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text.lower())
    if match is None:
        raise ConfigurationError(f"--older-than {text!r} is not an age", remedy="write it like 12h or 30d")
    return float(match[1]) * _UNITS[match[2]]


def _names_by_local_exports(settings: Settings) -> dict[str, str]:
    if not _exports_ran_here(settings):
        return {}
    from slipway.embedded.local_exports import local_exports

    return artifact_names(local_exports(settings))


def _used_by_local_exports(settings: Settings) -> frozenset[str]:
    if not _exports_ran_here(settings):
        return frozenset()
    from slipway.embedded.local_exports import digests_in_use

    return digests_in_use(settings)


def _exports_ran_here(settings: Settings) -> bool:
    """Return whether exports ran on this machine without a coordinator.

    Raises:
        ServiceError: ``UNSUPPORTED`` if they did, but the libraries that read their states are not installed.
    """
    try:
        if not any(settings.exports_path.iterdir()):
            return False
    except FileNotFoundError:
        return False
    require("coordinator", what=f"reading the exports in {settings.exports_path}")
    return True


def _makers(store: ArtifactStore) -> dict[str, list[str]]:
    """Return the output names in recorded results, by digest."""
    makers: dict[str, set[str]] = {}
    for result in store.results():
        for name, digest in result.outputs.items():
            makers.setdefault(digest, set()).add(name)
    return {digest: sorted(names) for digest, names in makers.items()}


def _collect(store: ArtifactStore, in_use: Callable[[], frozenset[str]], **limits: Any) -> Collected:
    if isinstance(store, LocalStore):
        return collect(store, keep=in_use, **limits)
    from slipway.artifacts.cached import CachedStore
    from slipway.artifacts.s3.collection import collect_bucket, expire_unfinished_uploads

    assert isinstance(store, CachedStore)
    if not limits["dry_run"]:
        expire_unfinished_uploads(store.remote.bucket)
    return collect_bucket(store.remote, keep=in_use, **limits)


def artifact_names(exports: Iterable[LocalExport]) -> dict[str, str]:
    """Return names by digest: ``h_half onnx-int8``, ``qwen3-base (base)``; the oldest export names a shared artifact."""
    names: dict[str, str] = {}
    for export in exports:
        if export.message is not None:
            names |= _names(export.message)
    return names


def content_name(files: Sequence[str], made_by: Sequence[str]) -> str:
    """Guess the name of an artifact that no export of this machine knows.

    Args:
        files: Paths in it.
        made_by: Names of the outputs under which stages recorded it.
    """
    if made_by:
        return ", ".join(made_by)
    known = next((name for file, name in _CONTENTS if file in files), "") or _model(files)
    return known or (f"{files[0]} and {len(files) - 1} more" if len(files) > 1 else "".join(files))


def _model(files: Sequence[str]) -> str:
    """Return which format's model the files are; empty if they fit no format."""
    for each, runtime in runtimes_to_try():
        if any(fnmatch(file, pattern) for file in files for pattern in runtime.files):
            return "adapter" if runtime.on_base else "model" if each.is_model else f"{each.title} model"
    return ""


def _names(export: pb.Export) -> dict[str, str]:
    labels: Mapping[str, str] = {name: one_line(value) for name, value in export.labels.items()}
    model = labels.get("model_name", "")
    sources = {
        "base": f"{labels.get('base_model', '')} (base)".strip(),
        "adapter": f"{model} {labels.get('checkpoint', '')} (adapter)".strip(),
    }
    names = {digest: sources.get(name, f"{model} ({name})".strip()) for name, digest in export.sources.items()}
    for task in export.tasks:
        for name, digest in task.outputs.items():
            what = task.format or (task.id if len(task.outputs) == 1 else f"{task.id} {name}")
            names[digest] = f"{model} {what}".strip()
    return names
