"""Show the progress of a transfer to or from an artifact store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipway.cli.progress.display import StageReporter, open_display
from slipway.cli.progress.forms import ProgressForm
from slipway.stage import Progress

Show = Callable[[int], Callable[[int], None]]
"""Function that takes the size of a transfer in bytes and returns one that takes the size of each finished piece."""

_INTERVAL_SECONDS = 0.1


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
