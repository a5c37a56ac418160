"""End an export from another thread, let the exports of a process take turns, and keep logs quiet where nobody reads them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping

from slipway.errors import StageError
from slipway.progress.observer import Observer
from slipway_protos.v1 import export_pb2 as pb

_TURN = threading.RLock()  # the same thread may come again, and is then refused by the coordinator that it runs
_LOOK_SECONDS = 0.2


class Interruption:
    """A request to end, from any thread. The work looks for it at every step, and waits for nothing that it cannot end."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._endings: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        """Whether the work shall end."""
        return self._requested.is_set()

    def request(self, error: Exception | None = None) -> None:
        """Ask the work to end: end what it waits for now.

        Args:
            error: What the work raises, instead of ``CANCELLED``; the first one counts.
        """
        with self._lock:
            if not self._requested.is_set():
                self._error = error
            self._requested.set()
            endings = list(self._endings)
        for end in endings:
            end()

    def check(self) -> None:
        """Raise if the work shall end.

        Raises:
            StageError: ``CANCELLED``, or the error that came with the request.
        """
        if self.requested:
            if self._error is not None:
                raise self._error
            raise StageError("interrupted", reason="CANCELLED", remedy="start the same export again to continue")

    @contextlib.contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call a function on a request while the block waits; it makes the block's call return or raise.

        Raises:
            StageError: ``CANCELLED``, in place of what the block raises after a request.
        """
        with self._lock:
            self._endings.append(end)
        try:
            self.check()
            yield
        except Exception:
            self.check()
            raise
        finally:
            with self._lock:
                self._endings.remove(end)

    @contextlib.contextmanager
    def turn(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Be the only export of this process that runs inside it, for the length of a block: it has one workflow engine.

        Args:
            tell: Takes a line about waiting for another export.

        Raises:
            StageError: ``CANCELLED``.
        """
        if not _TURN.acquire(blocking=False):
            tell("waiting for another export of this process")
            while not _TURN.acquire(timeout=_LOOK_SECONDS):
                self.check()
        try:
            yield
        finally:
            _TURN.release()


class InterruptibleObserver:
    """Passes everything on to another observer, and ends the work at the next word from it once that is requested."""

    def __init__(self, observer: Observer, interruption: Interruption) -> None:
        self._observer, self._interruption = observer, interruption

    def title(self, text: str) -> None:
        """Pass the title on."""
        self._interruption.check()
        self._observer.title(text)

    def note(self, message: str) -> None:
        """Pass a line on."""
        self._interruption.check()
        self._observer.note(message)

    def expect(self, task_seconds: Mapping[str, float]) -> None:
        """Pass the expected times on."""
        self._interruption.check()
        self._observer.expect(task_seconds)

    def event(self, event: pb.ExportEvent) -> None:
        """Pass an event on."""
        self._interruption.check()
        self._observer.event(event)

    def log(self, level: int, message: str) -> None:
        """Pass a line for the log on."""
        self._observer.log(level, message)


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
    """Keep Python from printing warnings to standard error while the block runs, in a program that has set up no logging."""
    log, handler = logging.getLogger("slipway"), logging.NullHandler()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
