"""Show the doctor's report as tables."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from slipway.cli.terminal.columns import Column, FittedTable, SharedHint
from slipway.machine.doctor import DoctorReport
from slipway.sizes import format_size


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
