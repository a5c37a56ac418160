"""Checkpoints as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from slipway.checkpoints import Checkpoint


def checkpoints_table(checkpoints: Sequence[Checkpoint], *, show: Callable[[str], str] = str) -> Table:
    """One row per checkpoint; the one an export would take is marked. ``show`` turns paths in messages into names."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "checkpoint", "step", "loss", "eval loss", "rank", "base model", "health"):
        table.add_column(name, overflow="fold")
    latest = next((checkpoint for checkpoint in checkpoints if checkpoint.healthy), None)
    for checkpoint in checkpoints:
        health = Text("usable", style="green")
        if not checkpoint.healthy:
            health = Text(show("; ".join(f"{p.reason}: {p.message}" for p in checkpoint.problems)), style="red")
        table.add_row(
            Text("→" if checkpoint is latest else "", style="bold"),
            Text(f"{checkpoint.path.name} (best)" if checkpoint.best else checkpoint.path.name),
            _number(checkpoint.step, "d"),
            _number(checkpoint.loss, ".4f"),
            _number(checkpoint.eval_loss, ".4f"),
            _number(checkpoint.rank, "d"),
            Text(checkpoint.base_model or "–"),
            health,
        )
    return table


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
