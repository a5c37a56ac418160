"""Progress for programs: values that a function of the program gets after every change, or bars on request."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from slipway.exporting.interruption import Interruption
from slipway.progress.observer import Observer, Silent
from slipway.progress.overview import Overview
from slipway.progress.tracking import ALONE, ExportProgress, Position, Tracked

OnProgress = Callable[[ExportProgress], object]


Opened = Callable[[Position], contextlib.AbstractContextManager[Observer]]


@contextlib.contextmanager
def observing_several(
    progress: bool | OnProgress, interruption: Interruption, relay: Callable[[Observer], Observer] = lambda each: each
) -> Iterator[Opened]:
    """Yield a function that opens the observer of one of several exports: as :func:`observing`, with a bar for each export.

    Args:
        progress: What was asked for.
        interruption: Gets an error of the function, which ends all exports.
        relay: Function that puts an observer between an export and what looks on.
    """
    lock = threading.RLock()
    with contextlib.ExitStack() as stack:
        if progress is True:
            from slipway.progress.notebook import display_here

            open_row = Overview(relay(stack.enter_context(display_here()))).open
            yield lambda position: contextlib.nullcontext(open_row(position.run, position.number, position.of))
        elif callable(progress):
            yield lambda position: contextlib.nullcontext(relay(_Calling(progress, interruption, position, lock)))
        else:
            yield lambda _: contextlib.nullcontext(Silent())


@contextlib.contextmanager
def observing(progress: bool | OnProgress, interruption: Interruption) -> Iterator[Observer]:
    """Yield an observer: nobody (False), bars (True), or one that calls a function after every change.

    Args:
        progress: What was asked for.
        interruption: Gets an error of the function, which ends the export.
    """
    if progress is True:
        from slipway.progress.notebook import display_here

        with display_here() as display:
            yield display
    else:
        yield _Calling(progress, interruption) if callable(progress) else Silent()


class _Calling(Tracked):
    """Calls a function with the progress after every change, never twice at a time."""

    def __init__(
        self,
        on_progress: OnProgress,
        interruption: Interruption,
        position: Position = ALONE,
        lock: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(position, lock)
        self._on_progress, self._interruption = on_progress, interruption

    def changed(self) -> None:
        """Call the function."""
        try:
            self._on_progress(self.progress())
        except StopIteration as error:  # it would end a generator or a coroutine on its way
            stopped = RuntimeError("progress raised StopIteration")
            self._interruption.request(stopped)
            raise stopped from error
        except Exception as error:
            self._interruption.request(error)
            raise
