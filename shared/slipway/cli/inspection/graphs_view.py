"""Show inspected graphs as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from slipway.cli.terminal.columns import Column, FittedTable, Prose
from slipway.model.activations.inspection import GraphReport, InspectedValue


def graph_tables(graph: GraphReport) -> Iterator[RenderableType]:
    """Yield the parts of a graph's answer: its name and properties, one row per input and output, and whether it ran."""
    yield Text(graph.file, style="bold")
    for key, text in graph.metadata.items():
        yield Prose(f"{key}: ", "dim", text)
    table = FittedTable(
        Column(""), Column("name"), Column("type"), Column("declared", wrap=True), Column("found", rank=1)
    )
    for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            table.add_row(kind, value.name, value.found_dtype or value.dtype, _shape(value.shape), _found(value))
    yield table
    if graph.not_run:
        yield Text(f"not run: {graph.not_run}", style="yellow")


def _shape(axes: tuple[str | int, ...]) -> str:
    return " × ".join(map(str, axes)) or "–"


def _found(value: InspectedValue) -> str:
    return "" if value.found is None else _shape(value.found)
