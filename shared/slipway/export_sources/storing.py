"""Put the files of sources into the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from slipway.artifacts import Artifacts
from slipway.sizes import format_size
from slipway.sources import SourceFolders


def store_files(
    sources: Mapping[str, Mapping[str, Path]],
    folders: SourceFolders,
    store: Artifacts,
    *,
    on_bytes: Callable[[str, int, int], None],
) -> dict[str, str]:
    """Put files into the store; return the digests of the sources by name.

    Args:
        sources: Files by source and path inside the artifact.
        folders: The folders that found them.
        store: The store.
        on_bytes: Called with a source's name, the bytes read so far and its size.
    """
    digests = {}
    for name, files in sources.items():
        total = sum(path.stat().st_size for path in files.values())
        digests[name] = folders.put(files, store, on_bytes=add_up(partial(on_bytes, name), total))
    return digests


def describe_reading(name: str, done: int, total: int) -> str:
    """Describe the progress of storing a source, for people."""
    return f"reading {name}: {done / max(total, 1):.0%} of {format_size(total)}"


def add_up(report: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """Return a function that adds up byte counts and reports the sum of ``total``. Several threads may call it."""
    lock, done = threading.Lock(), 0

    def add(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            now = done
        report(min(now, total), total)

    return add
