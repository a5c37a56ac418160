"""Show the progress of a transfer to or from an artifact store, the store's contents, and what a collection removed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.text import Text

from slipway.progress.display import StageReporter, open_display
from slipway.progress.observer import ProgressForm
from slipway.sizes import format_size
from slipway.stage import Progress
from slipway.terminal.columns import Column, FittedTable
from slipway.terminal.console import duration
from slipway.texts import counted

Show = Callable[[int], Callable[[int], None]]
"""Function that takes the size of a transfer in bytes and returns one that takes the size of each finished piece."""

_INTERVAL_SECONDS = 0.1

_SHORT = len("sha256:") + 12


@contextmanager
def show_transfer(name: str, phase: str, *, form: ProgressForm, level: str) -> Iterator[Show]:
    """Show a transfer as one task; a store may report pieces from several threads.

    Args:
        name: Name of the command.
        phase: What it does.
        form: Form of the progress.
        level: Least severe level that is logged.
    """
    with open_display(form, level=level) as display, StageReporter(name, display) as reporter:
        yield lambda total: _Counter(phase, total, reporter).add


class _Counter:
    """Counts the bytes of a transfer, and shows them at most ten times a second."""

    def __init__(self, phase: str, total: int, reporter: StageReporter) -> None:
        self._phase, self._total, self._reporter = phase, total, reporter
        self._lock = threading.Lock()
        self._done, self._shown = 0, 0.0

    def add(self, size: int) -> None:
        """Add the size of a piece."""
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._shown < _INTERVAL_SECONDS and self._done != self._total:
                return
            self._shown = now
            # A store with a cache reads the files twice: once they are read, how much follows is unknown.
            total = self._total if self._done <= self._total else 0
            self._reporter.progress(Progress(self._phase, done=self._done, total=total, unit="bytes"), 0)


def cache_table(listing: dict[str, Any]) -> Group:
    """Show artifacts with their size and last use, and their total size."""
    short = short_digests([entry["digest"] for entry in listing["artifacts"]])
    table = FittedTable(
        Column("artifact", wrap=True),
        Column("digest"),
        Column("files", rank=3, right=True),
        Column("size", rank=1, right=True),
        Column("used", rank=2, right=True),
    )
    for entry in listing["artifacts"]:
        age = duration(max(time.time() - entry["last_used"], 0))
        name = entry["name"] if entry["complete"] else f"{entry['name']} (incomplete)"
        table.add_row(name, short[entry["digest"]], str(entry["files"]), format_size(entry["size_bytes"]), f"{age} ago")
    total = f"{counted(len(listing['artifacts']), 'artifact')}, {format_size(listing['blob_bytes'])} on disk at {listing['store']}"
    return Group(table, Text(total))


def short_digests(digests: Sequence[str]) -> dict[str, str]:
    """Shorten each digest to 12 digits, or more if needed to keep all distinct; ``slipway pull`` and ``verify`` accept them."""
    length = _SHORT
    while len({digest[:length] for digest in digests}) < len(set(digests)):
        length += 4
    return {digest: digest[:length] for digest in digests}


def gc_line(done: dict[str, Any]) -> str:
    """Say what a collection removed."""
    verb = "would remove" if done["dry_run"] else "removed"
    line = f"{verb} {counted(len(done['artifacts']), 'artifact')} and {counted(done['blobs'], 'blob')}, {format_size(done['freed_bytes'])}"
    return "\n".join([line, *(f"  left by an interrupted stage: {name}" for name in done["kept"])])
