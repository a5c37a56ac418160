"""Read what a listing shows of ``trainer_state.json``: step, last losses and the run's best checkpoint.

The file grows with every logged step, to hundreds of megabytes in a long run. Trainer writes its keys in alphabetical order, so in a
large file everything that is needed stands before the log or at its end, and the middle is not read.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.files.json_documents import LARGEST, parse_json
from slipway.files.regular_file import open_regular

TRAINER_STATE = "trainer_state.json"
_BEGINNING = 64 << 10
"""Bytes before the log; Trainer writes a few hundred."""
_END = 4 << 20
"""Bytes at the end of a large file; some ten thousand logged steps."""
_LOG = re.compile(rb'"log_history"\s*:\s*\[')
_ENTRY = re.compile(rb"\{[^{}]{1,20000}\}")
_LOSSES = ("loss", "eval_loss")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """A part of Trainer's state.

    Attributes:
        step: The step it was saved at.
        losses: The last logged ``loss`` and ``eval_loss``, by name; in a large file only those near its end.
        best: Folder of the run's best checkpoint, as recorded; empty if there is none.
        best_metric: The metric that made it the best one.
    """

    step: int
    losses: dict[str, float | None]
    best: str
    best_metric: float | None


def read_trainer_state(path: Path) -> TrainerState:
    """Read a trainer's state in bounded time and memory, however large it is.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ValueError: It is not JSON, names no step, or is large and not written as Trainer does; the message is one line.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= LARGEST:
            state = parse_json(file.read(LARGEST), lenient=True)
            entries = state.get("log_history") if isinstance(state, dict) else None
        else:
            state = _parse_before_log(file.read(_BEGINNING))
            file.seek(-_END, os.SEEK_END)
            entries = _last_entries(file.read(_END))
    if not isinstance(state, dict) or not _is_step(state.get("global_step")):
        raise ValueError("it names no global_step")
    best = state.get("best_model_checkpoint")
    return TrainerState(
        step=state["global_step"],
        losses=_last_losses(entries if isinstance(entries, list) else []),
        best=best if isinstance(best, str) else "",
        best_metric=_figure(state.get("best_metric")),
    )


def _parse_before_log(data: bytes) -> Any:
    """Return the members of the state that stand before its log."""
    log = _LOG.search(data)
    if log is None:
        raise ValueError(f"it has more than {LARGEST} bytes, and no log_history within the first {_BEGINNING}")
    return parse_json(data[: log.end()] + b"]}", lenient=True)


def _last_entries(data: bytes) -> list[Any]:
    """Return the last logged steps that name each loss; the data begins somewhere in the log and ends with the file."""
    if not data.rstrip().endswith(b"}"):
        raise ValueError("it is cut off")
    last: dict[str, bytes] = {}
    for match in _ENTRY.finditer(data):
        entry = match.group()
        for key in _LOSSES:
            if f'"{key}"'.encode() in entry:
                last[key] = entry
    return [_parse_entry(entry) for entry in last.values()]


def _parse_entry(entry: bytes) -> Any:
    try:
        return parse_json(entry, lenient=True)
    except ValueError:
        return None


def _last_losses(entries: list[Any]) -> dict[str, float | None]:
    losses = dict.fromkeys(_LOSSES, None) | {
        key: entry[key] for entry in entries if isinstance(entry, dict) for key in _LOSSES if key in entry
    }
    return {key: _figure(value) for key, value in losses.items()}


def _figure(value: object) -> float | None:
    """Return a logged figure; None if it is not a finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18
