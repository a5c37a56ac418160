"""``slipway export --plan``: show the tasks, whether this machine can run them, and the settings behind them; run and write nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import RenderableType
from rich.text import Text

from slipway.artifacts import LocalStore
from slipway.base_match import BaseMatchStatus
from slipway.cli.connection import artifacts_at
from slipway.cli.terminal.columns import Column, FittedTable, Prose, SharedHint
from slipway.cli.terminal.console import print_json, show, unbroken_line
from slipway.client.calls import DEFAULT_PROJECT
from slipway.configuration import ExportConfiguration, LoadedConfiguration
from slipway.errors import ModelExportError
from slipway.export_sources.discovery import Sources, find_sources
from slipway.export_sources.naming import source_settings
from slipway.formats.tasks import PlannedTask
from slipway.model.configuration import ModelConfig
from slipway.planning.calibration import SOURCE as CALIBRATION
from slipway.planning.plan import OPTIONAL_SOURCES, more_adapters, plan, tasks_in_reserve
from slipway.planning.precedents import Precedent, precedent_key, with_precedent
from slipway.planning.preflight import Finding, Preflight, Verdict, preflight
from slipway.planning.references import Source, parse_reference
from slipway.reasons import REASONS
from slipway.settings import Settings
from slipway.settings.s3 import SCHEME
from slipway.settings.sections import Listed
from slipway.sizes import format_size
from slipway.sources import SourceFolders
from slipway.validation.inputs import OWN_TEXT, TEST_INPUTS

_VERDICTS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}


def show_plan(loaded: LoadedConfiguration, settings: Settings, *, as_json: bool) -> int:
    """Print what an export would do; return the exit code of the first check that makes it impossible, or 0."""
    sources, checked, tasks = examine(loaded, settings)
    if as_json:
        print_json(_document(loaded, sources, checked, tasks))
    else:
        show(*_tables(loaded, sources, checked, tasks))
    error = checked.error()
    return REASONS[error.reason].category.exit_code if error else 0


def examine(
    loaded: LoadedConfiguration, settings: Settings
) -> tuple[Sources | None, Preflight, tuple[PlannedTask, ...]]:
    """Return the sources (None if not usable), the preflight and the tasks of a configuration."""
    configuration, here = loaded.configuration, not settings.coordinator
    adapters = {"adapter", *more_adapters(configuration)} if configuration.checkpoint.path else set()
    names = {"base", *adapters}
    names |= {name for name in source_settings(configuration) if name in OPTIONAL_SOURCES}
    tasks = plan(configuration, names)
    try:
        with contextlib.ExitStack() as stack:
            store = None if here else stack.enter_context(artifacts_at(settings.coordinator, settings))
            folders = stack.enter_context(SourceFolders(settings, store))
            sources = find_sources(configuration, folders, origins=loaded.origins)
            if sources.calibration is not None:
                names.add(CALIBRATION)
            if sources.own_text is not None:
                names.add(OWN_TEXT)
            tasks = plan(configuration, names, source_formats=sources.formats)
            tasks, begun = _apply_precedents(tasks, sources, settings) if here else (tasks, [])
            checked = preflight(
                tasks,
                base=sources.base,
                adapter=sources.checkpoint.path if sources.checkpoint else None,
                config=sources.config,
                sections=dict(configuration.formats),
                home=settings.home,
                output=Path(configuration.output.directory),
                here=here,
            )
            checked = replace(
                checked,
                findings=(
                    *_base_findings(sources, configuration),
                    *_class_findings(sources),
                    *begun,
                    *checked.findings,
                ),
            )
    except ModelExportError as error:
        finding = Finding("sources", Verdict.ERROR, error.message, error.remedy, error.reason)
        return None, Preflight((finding,)), tasks
    return sources, checked, tasks


def _base_findings(sources: Sources, configuration: ExportConfiguration) -> list[Finding]:
    """Return the finding about the base model; none for a trusted base, which is already among the warnings."""
    base_match, validation = sources.base_match, configuration.validation
    if base_match is None:
        return [Finding("base model", Verdict.OK, "no checkpoint is set: it is exported as it is")]
    match base_match.status:
        case BaseMatchStatus.TRUSTED:
            return []
        case BaseMatchStatus.CONFIRMED:
            return [Finding("base model", Verdict.OK, base_match.reason)]
    if validation.enabled and validation.compare_outputs and sources.heldout is not None:
        return [Finding("base model", Verdict.OK, f"{base_match.reason}; validation judges it by the held-out text")]
    if sources.own_text is not None:
        said = f"{base_match.reason}; validation judges it by {sources.own_text.name}, beside the run"
        return [Finding("base model", Verdict.OK, said)]
    remedy = "validation can judge it by held-out text: set validation.heldout"
    return [Finding("base model", Verdict.WARNING, base_match.reason, remedy)]


def _class_findings(sources: Sources) -> list[Finding]:
    """Return the finding about the merged model's class, if it differs from the base's."""
    return [Finding("model class", Verdict.OK, str(sources.trained))] if sources.trained else []


def _apply_precedents(
    tasks: Sequence[PlannedTask], sources: Sources, settings: Settings
) -> tuple[tuple[PlannedTask, ...], list[Finding]]:
    """Start tasks with the parameters that worked before; return all tasks, and a finding for each such task. A store in a bucket is not read."""
    root = Path(settings.store) if settings.store else settings.store_path
    if settings.store.startswith(SCHEME) or not root.is_dir():
        return tuple(tasks), []
    config = sources.config or ModelConfig.read(sources.base)
    store, findings = LocalStore(root), []
    begun = []
    for task in tasks:
        key = precedent_key(task, config.class_and_type, project=DEFAULT_PROJECT)
        precedent = Precedent.of_result(store.recorded_action(key), task) if key else None
        begun.append(with_precedent(task, precedent))
        if precedent is not None:
            findings.append(Finding(f"precedent: {task.id}", Verdict.OK, precedent.note))
    return tuple(begun), findings


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
            "checkpoint": sources.folders.show(str(sources.checkpoint.path)) if sources.checkpoint else None,
            "heldout": sources.folders.show(str(sources.heldout)) if sources.heldout else None,
            "calibration": sources.folders.show(str(sources.calibration)) if sources.calibration else None,
            **({TEST_INPUTS: sources.folders.show(str(sources.test_inputs))} if sources.test_inputs else {}),
        },
        "base_match": sources.base_match.model_dump(mode="json") if sources and sources.base_match else None,
        "trained_as": {"class": sources.trained.name, "labels": sources.trained.labels}
        if sources and sources.trained
        else None,
        "tasks": [asdict(task) for task in tasks],
        "preflight": checked.to_json(),
    }


def _tables(
    loaded: LoadedConfiguration, sources: Sources | None, checked: Preflight, tasks: Sequence[PlannedTask]
) -> list[RenderableType]:
    """Show the sources, the tasks, the checks of this machine, the warnings and the settings."""
    parts: list[RenderableType] = []
    if sources:
        parts += [Text(sources.title, style="bold"), *_folders(sources), Text()]
    tables = (_graph(tasks, checked), _preflight(checked), _settings(loaded))
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


def _preflight(checked: Preflight) -> FittedTable:
    table = FittedTable(Column("preflight"), Column("", width=7), Column("found", wrap=True), hint="")
    for finding in checked.findings:
        verdict = Text(finding.verdict.value, style=_VERDICTS[finding.verdict])
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        table.add_row(finding.check, verdict, Text.assemble(finding.message, (remedy, "cyan")))
    return table
