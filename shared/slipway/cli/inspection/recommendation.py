"""Show what ``slipway recommend`` chose, with figures that earlier exports measured."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from slipway.advice.measured import Measured
from slipway.advice.recommendation import Recommendation, format_estimate
from slipway.formats.targets import TARGETS
from slipway.terminal.columns import Column, FittedTable, Prose


def advice_view(advice: Recommendation) -> Iterator[RenderableType]:
    """Yield the recommendation, all that was considered, and the configuration."""
    best = advice.best
    yield Text(f"{best.output} for {advice.target} ({TARGETS[advice.target]})", style="bold")
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
    for one in advice.candidates:
        why = Text(one.unfit, style="yellow") if one.unfit else Text("" if one.why == said else one.why)
        said = one.why
        table.add_row(
            one.output,
            format_estimate(one.size_bytes),
            format_estimate(one.memory_bytes),
            _figures(advice.measured.get(one.output)),
            why,
        )
    yield table
    yield Text()
    yield Text(advice.yaml.rstrip())


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
