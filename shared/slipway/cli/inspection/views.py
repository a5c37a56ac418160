"""Show the doctor's report, checkpoints, inspected graphs and recommendations as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from slipway.advice.measured import Measured
from slipway.advice.recommendation import Recommendation, format_estimate
from slipway.formats.targets import TARGETS
from slipway.machine.doctor import DoctorReport
from slipway.model.activations import GraphReport, InspectedValue
from slipway.model.runs.checkpoints import Checkpoint
from slipway.sizes import format_size
from slipway.terminal.columns import Column, FittedTable, Prose, SharedHint


def doctor_tables(report: DoctorReport) -> Group:
    """Show the machine, the stages and the formats."""
    stages, formats = _stages(report), _formats(report)
    return Group(_machine(report), Text(), stages, Text(), formats, SharedHint(stages, formats))


def _mark(good: bool) -> Text:
    return Text("yes", style="green") if good else Text("no", style="red")


def _machine(report: DoctorReport) -> FittedTable:
    machine = report.machine
    table = FittedTable(Column("", style="bold"), Column("", wrap=True), header="")
    rows = {
        "slipway": machine.slipway,
        "python": machine.python,
        "platform": machine.platform,
        "processor": f"{machine.processor}, {machine.cores} cores",
        "memory": f"{format_size(machine.memory_bytes)}, {format_size(machine.memory_available_bytes)} available",
        "SLIPWAY_HOME": f"{machine.home}, {format_size(machine.home_free_bytes)} free"
        + ("" if machine.home_writable else ", not writable"),
        "gpu": f"{machine.gpu}, {format_size(machine.gpu_memory_bytes)}" if machine.gpu else "none",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _stages(report: DoctorReport) -> FittedTable:
    table = FittedTable(
        Column("stage", style="bold"),
        Column("runs"),
        Column("library"),
        Column("there", rank=2),
        Column("version", rank=3),
        Column("detail", wrap=True),
        hint="",
    )
    for stage in report.stages:
        first = (Text(stage.name), _mark(stage.available))
        if not stage.providers:
            table.add_row(*first, "", "", "", stage.missing)
        for provider in stage.providers:
            table.add_row(*first, provider.name, _mark(provider.available), provider.version, provider.detail)
            first = (Text(), Text())
    return table


def _formats(report: DoctorReport) -> FittedTable:
    table = FittedTable(Column("format", style="bold"), Column("can be made"), Column("why not", wrap=True), hint="")
    for entry in report.formats:
        table.add_row(entry.name, _mark(entry.available), entry.detail)
    return table


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
            table.add_row(kind, value.name, value.found_dtype or value.dtype, _shape(value.shape), _found_shape(value))
    yield table
    if graph.not_run:
        yield Text(f"not run: {graph.not_run}", style="yellow")


def _shape(axes: tuple[str | int, ...]) -> str:
    return " × ".join(map(str, axes)) or "–"


def _found_shape(value: InspectedValue) -> str:
    return "" if value.found is None else _shape(value.found)


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
