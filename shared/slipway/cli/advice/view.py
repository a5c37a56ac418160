"""Show a recommendation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from slipway.advice.candidates import Candidate
from slipway.advice.measured import Measured
from slipway.cli.terminal.columns import Column, FittedTable, Prose
from slipway.formats.targets import TARGETS
from slipway.sizes import format_size


def advice_view(
    target: str, found: Sequence[Candidate], measured: Mapping[str, Measured], settings: str
) -> Iterator[RenderableType]:
    """Yield the recommendation, all that was considered, and the configuration."""
    best = found[0]
    yield Text(f"{best.output} for {target} ({TARGETS[target]})", style="bold")
    yield Prose("", "", f"{best.why}.")
    yield Text()
    table = FittedTable(
        Column("output", style="bold"),
        Column("size", rank=3, right=True),
        Column("memory", rank=2, right=True),
        Column("measured", rank=1, wrap=True),
        Column("why", wrap=True),
    )
    said = ""
    for one in found:
        why = Text(one.unfit, style="yellow") if one.unfit else Text("" if one.why == said else one.why)
        said = one.why
        table.add_row(
            one.output, _size(one.size_bytes), _size(one.memory_bytes), _figures(measured.get(one.output)), why
        )
    yield table
    yield Text()
    yield Text(settings.rstrip())


def _size(value: int | None) -> str:
    return "–" if value is None else f"≤ {format_size(value)}"


def _figures(measured: Measured | None) -> str:
    if measured is None:
        return "–"
    parts = [
        (measured.decode_tokens_per_second, "{:.1f} tokens/s"),
        (measured.prefill_ms, "{:.0f} ms"),
        (measured.memory_mb, "{:.0f} MB"),
        (measured.mean_kl, "KL {:.1e}"),
    ]
    return ", ".join([*(form.format(value) for value, form in parts if value is not None), measured.status])
