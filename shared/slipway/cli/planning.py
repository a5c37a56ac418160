"""``slipway export --plan``: the settings with their sources, the task graph and the preflight; nothing is run or written."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipway.base_match import BaseMatchStatus
from slipway.cli.connection import artifacts_at
from slipway.cli.console import answers, print_json, size
from slipway.cli.sources import Sources, find_sources
from slipway.configuration import ExportConfiguration, LoadedConfiguration
from slipway.errors import REASONS, ModelExportError
from slipway.preflight import Finding, Preflight, Verdict, preflight
from slipway.settings import Settings
from slipway.sources import SourceFolders
from slipway_coordinator.plan import PlannedTask, more_adapters, plan

_VERDICTS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}


def show_plan(loaded: LoadedConfiguration, settings: Settings, *, coordinator: str, as_json: bool) -> int:
    """Print what an export would do; answers the exit code, that of the first check that rules it out."""
    sources, checked, tasks = examine(loaded, settings, here=not coordinator)
    if as_json:
        print_json(_document(loaded, sources, checked, tasks))
    else:
        answers.print(_tables(loaded, sources, checked, tasks))
    error = checked.error()
    return REASONS[error.reason].category.exit_code if error else 0


def examine(
    loaded: LoadedConfiguration, settings: Settings, *, here: bool
) -> tuple[Sources | None, Preflight, tuple[PlannedTask, ...]]:
    """Sources (None when they are not usable), preflight and task graph of a configuration."""
    configuration = loaded.configuration
    names = {"base", "adapter", *more_adapters(configuration)}
    if configuration.validation.heldout:
        names.add("heldout")
    tasks = plan(configuration, names)
    try:
        with contextlib.ExitStack() as stack:
            store = None if here else stack.enter_context(artifacts_at(settings.coordinator, settings))
            folders = stack.enter_context(SourceFolders(settings, store))
            sources = find_sources(configuration, folders, origins=loaded.origins)
            tasks = plan(configuration, names, source_formats=sources.formats)
            checked = preflight(
                tasks, base=sources.base, home=settings.home, output=Path(configuration.output.directory), here=here
            )
            checked = replace(checked, findings=(*_base(sources, configuration), *checked.findings))
    except ModelExportError as error:
        finding = Finding("sources", Verdict.ERROR, error.message, error.remedy, error.reason)
        return None, Preflight((finding,)), tasks
    return sources, checked, tasks


def _base(sources: Sources, configuration: ExportConfiguration) -> list[Finding]:
    """What files tell of the base model, and what is missing to know more; a base taken on trust is among the warnings."""
    found, validation = sources.base_match, configuration.validation
    match found.status:
        case BaseMatchStatus.TRUSTED:
            return []
        case BaseMatchStatus.CONFIRMED:
            return [Finding("base model", Verdict.OK, found.reason)]
    if validation.enabled and validation.compare_outputs and sources.heldout is not None:
        return [Finding("base model", Verdict.OK, f"{found.reason}; validation judges it by the held-out text")]
    remedy = "validation can judge it by held-out text: set validation.heldout"
    return [Finding("base model", Verdict.WARNING, found.reason, remedy)]


def _document(
    loaded: LoadedConfiguration, sources: Sources | None, checked: Preflight, tasks: Sequence[PlannedTask]
) -> dict[str, Any]:
    return {
        "configuration": loaded.configuration.model_dump(mode="json"),
        "origins": dict(loaded.origins),
        "warnings": [*loaded.warnings, *(sources.warnings if sources else ())],
        "sources": None
        if sources is None
        else {
            "base": sources.folders.show(str(sources.base)),
            "checkpoint": sources.folders.show(str(sources.checkpoint.path)),
            "heldout": sources.folders.show(str(sources.heldout)) if sources.heldout else None,
        },
        "base_match": sources.base_match.model_dump(mode="json") if sources else None,
        "tasks": [asdict(task) for task in tasks],
        "preflight": checked.to_json(),
    }


def _tables(
    loaded: LoadedConfiguration, sources: Sources | None, checked: Preflight, tasks: Sequence[PlannedTask]
) -> RenderableType:
    warnings = [*loaded.warnings, *(sources.warnings if sources else ())]
    lines = [Text.assemble(("warning ", "yellow"), warning) for warning in warnings]
    found: list[RenderableType] = [_sources(sources), Text()] if sources else []
    return Group(_settings(loaded), Text(), *found, _graph(tasks, checked), Text(), _preflight(checked), *lines)


def _settings(loaded: LoadedConfiguration) -> Table:
    table = _table("setting", "value", "from")
    for key, origin in sorted(loaded.origins.items()):
        value: Any = loaded.configuration
        for part in key.split("."):
            value = getattr(value, part)
        style = "dim" if origin == "default" else ""
        table.add_row(Text(key, style=style), Text(_shown(value), style=style), Text(origin, style="dim"))
    return table


def _sources(sources: Sources) -> Table:
    """What was chosen: the newest whole checkpoint, and where a base model's name led."""
    table = _table("source", "folder")
    table.add_row(Text("base"), Text(str(sources.base)))
    table.add_row(Text("checkpoint"), Text(str(sources.checkpoint.path)))
    if sources.heldout:
        table.add_row(Text("heldout"), Text(str(sources.heldout)))
    return table


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if hasattr(value, "opt"):
        return f"[{value.min}, {value.opt}, {value.max}]"
    return "–" if value in (None, "") else str(value)


def _graph(tasks: Sequence[PlannedTask], checked: Preflight) -> Table:
    table = _table("task", "delivers", "size", "from", "parameters")
    for task in tasks:
        inputs = ", ".join(dict.fromkeys(source.partition(":")[2].partition("/")[0] for source in task.inputs.values()))
        params = " ".join(f"{name}={_param(value)}" for name, value in task.params.items())
        made = (checked.task_bytes or {}).get(task.id, 0)
        shown = f"≤ {size(made)}" if made else ""
        table.add_row(*(Text(part) for part in (task.id, task.format, shown, inputs, params)))
    return table


def _param(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(str(part) for part in value.values())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _preflight(checked: Preflight) -> Table:
    table = _table("preflight", "", "found", "remedy")
    for finding in checked.findings:
        verdict = Text(finding.verdict.value, style=_VERDICTS[finding.verdict])
        table.add_row(Text(finding.check), verdict, Text(finding.message), Text(finding.remedy))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    return table
