"""``slipway export --plan``: show the tasks, whether this machine can run them, and the settings behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from rich.console import RenderableType
from rich.text import Text

from slipway.configuration import LoadedConfiguration
from slipway.export_sources.discovery import Sources
from slipway.exporting.planned import ExportPlan, make_plan
from slipway.formats.tasks import PlannedTask
from slipway.planning.plan import tasks_in_reserve
from slipway.planning.preflight import Finding, Preflight, Verdict
from slipway.planning.references import Source, parse_reference
from slipway.reasons import REASONS
from slipway.settings import Settings
from slipway.settings.sections import Listed
from slipway.sizes import format_size
from slipway.terminal.columns import Column, FittedTable, Prose, SharedHint
from slipway.terminal.console import print_json, show, unbroken_line

_VERDICTS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}


def show_plan(loaded: LoadedConfiguration, settings: Settings, *, as_json: bool) -> int:
    """Print what an export would do; return the exit code of the first check that makes it impossible, or 0."""
    made = make_plan(loaded, settings)
    if as_json:
        print_json(made.to_json())
    else:
        show(*_tables(made))
    error = made.error()
    return REASONS[error.reason].category.exit_code if error else 0


def _tables(made: ExportPlan) -> list[RenderableType]:
    """Show the sources, the tasks, the checks of this machine, the warnings and the settings."""
    loaded, sources = made.loaded, made.sources
    parts: list[RenderableType] = []
    if sources:
        parts += [Text(sources.title, style="bold"), *_folders(sources), Text()]
    tables = (_graph(made.tasks, made.checked), findings_table(made.checked.findings), _settings(loaded))
    graph, checks, settings = tables
    parts += [graph, Text(), checks, Text()]
    warnings = dict.fromkeys((*loaded.warnings, *(sources.warnings if sources else ())))
    parts += [Prose("warning ", "yellow", warning) for warning in warnings]
    parts += [Text()] if warnings else []
    others = len(loaded.origins) - settings.row_count
    rest = Text(f"{others} settings have their defaults; --json shows them all", style="dim")
    return [*parts, *([settings] if settings.row_count else []), rest, SharedHint(*tables)]


def _folders(sources: Sources) -> list[Text]:
    """Show the chosen folders: the newest complete checkpoint, the base model and the held-out text."""
    checkpoint = sources.checkpoint.path if sources.checkpoint else None
    folders = {
        "checkpoint": checkpoint,
        "base": sources.base,
        "heldout": sources.heldout,
        "calibration": sources.calibration,
        "test inputs": sources.test_inputs,
    }
    show_path = sources.folders.show
    return [unbroken_line(f"{name:<12}", show_path(str(path)), style="dim") for name, path in folders.items() if path]


def _settings(loaded: LoadedConfiguration) -> FittedTable:
    """Show the settings that are not defaults."""
    origins = Column("from", rank=1, wrap=True, style="dim")
    table = FittedTable(Column("setting"), Column("value", wrap=True), origins, hint="")
    for key, origin in sorted(loaded.origins.items()):
        if origin == "default":
            continue
        value: Any = loaded.configuration
        for part in key.split("."):
            value = getattr(value, part)
        table.add_row(key, _format_value(value), origin)
    return table


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Listed):
        return str(value)
    if isinstance(value, BaseModel):
        return _format_value(value.model_dump(exclude_none=True))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_format_value(each)}" for key, each in value.items()) or "none"
    return "–" if value in (None, "") else str(value)


def _graph(tasks: Sequence[PlannedTask], checked: Preflight) -> FittedTable:
    table = FittedTable(
        Column("task"),
        Column("delivers", rank=1),
        Column("size", rank=2, right=True),
        Column("from", rank=3, wrap=True),
        Column("parameters", rank=4, wrap=True),
        hint="",
    )
    reserve = tasks_in_reserve(tasks)
    for task in tasks:
        sources = map(parse_reference, task.inputs.values())
        names = (each.name if isinstance(each, Source) else each.task for each in sources)
        inputs = ", ".join(dict.fromkeys(names))
        params = " ".join(f"{name}={_param(value)}" for name, value in task.params.items())
        made = (checked.task_bytes or {}).get(task.id, 0)
        delivers = "(in reserve)" if task.id in reserve else task.format
        table.add_row(task.id, delivers, f"≤ {format_size(made)}" if made else "", inputs, params)
    return table


def _param(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(map(_param, value.values()))
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def findings_table(findings: Iterable[Finding]) -> FittedTable:
    """Show checks with their verdicts."""
    table = FittedTable(Column("preflight"), Column("", width=7), Column("found", wrap=True), hint="")
    for finding in findings:
        verdict = Text(finding.verdict.value, style=_VERDICTS[finding.verdict])
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        table.add_row(finding.check, verdict, Text.assemble(finding.message, (remedy, "cyan")))
    return table
