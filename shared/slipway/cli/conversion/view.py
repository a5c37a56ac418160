"""Show what a conversion did."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from slipway.cli.terminal.columns import Column, FittedTable, Prose
from slipway.counts import counted
from slipway.model.weights.conversion import Conversion, ConvertedWeights
from slipway.sizes import format_size


def conversion_table(found: Conversion) -> Iterator[RenderableType]:
    """Yield one row per model or file of weights, and below them what was left as it is."""
    table = FittedTable(
        Column("source", style="bold"),
        Column("result", wrap=True),
        Column("tensors", rank=2, right=True),
        Column("size", rank=1, right=True),
        Column("left out", rank=3, wrap=True),
    )
    for one in found.weights:
        done = bool(one.target)
        table.add_row(
            one.source,
            _result(one) if done else Text(f"{one.reason}: {one.message}", style="red"),
            str(one.tensors) if done else "–",
            format_size(one.nbytes) if done else "–",
            ", ".join([*one.left_out, *(f"{name} (tied)" for name in one.ties)]),
        )
    yield table
    for skipped in found.skipped:
        yield Prose(f"{skipped.source}: ", "dim", skipped.why)


def _result(one: ConvertedWeights) -> str:
    return one.target if one.files == 1 else f"{one.target} and {counted(one.files - 1, 'more file')}"
