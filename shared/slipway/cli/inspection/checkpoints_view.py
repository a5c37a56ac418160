"""Show checkpoints as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from slipway.cli.terminal.columns import Column, FittedTable
from slipway.model.runs.checkpoints import Checkpoint


def checkpoints_table(checkpoints: Sequence[Checkpoint], *, show: Callable[[str], str] = str) -> FittedTable:
    """Show one row per checkpoint, and mark the one that an export would take. ``show`` replaces paths in messages by names."""
    table = FittedTable(
        Column("checkpoint"),
        Column("", width=1),
        Column("step", rank=4, right=True),
        Column("loss", rank=2, right=True),
        Column("eval loss", rank=3, right=True),
        Column("rank", rank=5, right=True),
        Column("base model", rank=1, wrap=True),
        Column("health", wrap=True),
    )
    latest = next((checkpoint for checkpoint in checkpoints if checkpoint.healthy), None)
    for checkpoint in checkpoints:
        health = Text("usable", style="green")
        if not checkpoint.healthy:
            health = Text(show("; ".join(f"{p.reason}: {p.message}" for p in checkpoint.problems)), style="red")
        table.add_row(
            f"{checkpoint.path.name} (best)" if checkpoint.best else checkpoint.path.name,
            Text("→" if checkpoint is latest else "", style="bold"),
            _number(checkpoint.step, "d"),
            _number(checkpoint.loss, ".4f"),
            _number(checkpoint.eval_loss, ".4f"),
            _number(checkpoint.rank, "d"),
            checkpoint.base_model or "–",
            health,
        )
    return table


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
