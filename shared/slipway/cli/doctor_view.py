"""The doctor's report as tables."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from slipway.cli.console import size
from slipway.doctor import DoctorReport


def doctor_tables(report: DoctorReport) -> Group:
    """The machine, the stages and the formats."""
    return Group(_machine(report), Text(), _stages(report), Text(), _formats(report))


def _mark(good: bool) -> Text:
    return Text("yes", style="green") if good else Text("no", style="red")


def _machine(report: DoctorReport) -> Table:
    machine = report.machine
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = {
        "slipway": machine.slipway,
        "python": machine.python,
        "platform": machine.platform,
        "processor": f"{machine.processor}, {machine.cores} cores",
        "memory": f"{size(machine.memory_bytes)}, {size(machine.memory_available_bytes)} available",
        "SLIPWAY_HOME": f"{machine.home}, {size(machine.home_free_bytes)} free"
        + ("" if machine.home_writable else ", not writable"),
        "gpu": f"{machine.gpu}, {size(machine.gpu_memory_bytes)}" if machine.gpu else "none",
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _stages(report: DoctorReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "runs", "library", "there", "version", "detail"):
        table.add_column(name, overflow="fold")
    for stage in report.stages:
        first = (Text(stage.name, style="bold"), _mark(stage.available))
        if not stage.providers:
            table.add_row(*first, "", "", "", Text(stage.missing))
        for provider in stage.providers:
            table.add_row(*first, provider.name, _mark(provider.available), provider.version, Text(provider.detail))
            first = (Text(), Text())
    return table


def _formats(report: DoctorReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("format", "can be made", "why not"):
        table.add_column(name, overflow="fold")
    for entry in report.formats:
        table.add_row(Text(entry.name, style="bold"), _mark(entry.available), Text(entry.detail))
    return table
