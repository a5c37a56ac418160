"""Show the progress of an export where a program runs: in the output of a notebook's cell, on a terminal, or as lines."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Self

from slipway.progress.display import Display, LineDisplay, LiveDisplay, on_terminal
from slipway.progress.rendering import PlainLines, amount, speed, state_of
from slipway.progress.rows import Overall, Row, Rows
from slipway.representation import escaped
from slipway.sizes import format_size
from slipway.terminal.console import duration, errors
from slipway_protos.v1 import export_pb2 as pb

_INTERVAL_SECONDS = 0.25
"""Least time between two drawings, but for those after a change of state."""


_bars = threading.Lock()
"""Held by the display that has its bars on the terminal, which has room for one at a time."""


@contextlib.contextmanager
def display_here() -> Iterator[Display]:
    """Enter the display for this process; logs stay as the program has set them up."""
    update, shown = _open_output(), Display()
    with contextlib.ExitStack() as stack:
        if update is not None:
            shown = NotebookDisplay(update)
        elif on_terminal() and _bars.acquire(blocking=False):
            stack.callback(_bars.release)
            shown = LiveDisplay(errors, resuming=True)
        else:
            shown = LineDisplay(PlainLines(sys.stderr), resuming=True)
        yield stack.enter_context(shown)


def _open_output() -> Callable[[str], None] | None:
    """Return a function that shows HTML in place of what it showed before in a cell's output; None outside of a notebook."""
    module: Any = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if getattr(shell, "kernel", None) is None:  # a shell in a terminal has none
        return None
    output: Any = import_module("IPython.display")
    handle = output.display(output.HTML(""), display_id=True)
    return lambda text: handle.update(output.HTML(text))


class NotebookDisplay(Display):
    """Shows a table with a row and a bar per task, drawn again in place.

    Args:
        update: Shows HTML in place of what it showed before.
        clock: Function that returns seconds since any fixed time.
    """

    def __init__(self, update: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._update, self._clock = update, clock
        self._rows, self._overall = Rows(resuming=True), Overall(clock=clock)
        self._title = self._note = ""
        self._drawn: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._note = ""
        self._draw()

    def title(self, text: str) -> None:
        """Show the title above the table."""
        self._title = text
        self._draw()

    def expect(self, task_seconds: Mapping[str, float]) -> None:
        """Weight the tasks by their expected time."""
        self._overall.task_seconds = task_seconds

    def event(self, event: pb.ExportEvent) -> None:
        """Take an event, and draw the table again."""
        super().event(event)
        changed = self._rows.take(event)
        self._overall.update(self._rows)
        self._draw(now=bool(changed))

    def note(self, message: str) -> None:
        """Show a line below the table."""
        self._note = message
        self._draw(now=False)

    def _draw(self, *, now: bool = True) -> None:
        time_now = self._clock()
        if now or self._drawn is None or time_now - self._drawn >= _INTERVAL_SECONDS:
            self._drawn = time_now
            self._update(self._html())

    def _html(self) -> str:
        rows = "".join(_row(row) for row in self._rows.tasks.values())
        table = f"<table>{rows}{self._total()}</table>" if rows else ""
        lines = (f"<b>{escaped(self._title)}</b>" if self._title else "", table, escaped(self._note))
        return "".join(f"<div>{line}</div>" for line in lines if line)

    def _total(self) -> str:
        left = self._overall.remaining_seconds()
        said = f"{self._overall.done:.0%}" + ("" if left is None else f", about {duration(left)} left")
        return _cells("total", said, _bar(self._overall.done), "", "")


def _row(row: Row) -> str:
    elapsed = row.elapsed_seconds(time.time())
    figures = " · ".join(filter(None, (amount(row), speed(row)))) if row.state == "running" else ""
    memory = format_size(row.memory_bytes) if row.memory_bytes else ""
    took = " · ".join(filter(None, (memory, "" if elapsed is None else duration(elapsed))))
    share = 1.0 if row.state == "succeeded" else row.done / row.total if row.state == "running" and row.total else 0.0
    return _cells(row.task, state_of(row), _bar(min(share, 1.0)), figures, took)


def _cells(task: str, state: str, bar: str, figures: str, took: str) -> str:
    return f"<tr><td>{escaped(task)}</td><td>{escaped(state)}</td><td>{bar}</td><td>{escaped(figures)}</td><td>{escaped(took)}</td></tr>"


def _bar(share: float) -> str:
    return f'<progress max="1" value="{share:.3f}"></progress>'
