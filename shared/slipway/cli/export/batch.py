"""``slipway export --each FOLDER``: run or plan the exports of a folder, and print one table of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from slipway.cli.export.planned import findings_table
from slipway.configuration import LoadedConfiguration
from slipway.exporting.batches.planned import BatchPlan, PlannedExport, plan_batch
from slipway.exporting.batches.result import HEADINGS, BatchResult, rows
from slipway.exporting.batches.running import Batch, OpenObserver
from slipway.exporting.batches.subjects import LeftOut, find_subjects
from slipway.observability.telemetry import tracing
from slipway.progress.display import open_display
from slipway.progress.observer import Observer, ProgressForm
from slipway.progress.overview import Overview
from slipway.progress.rendering import about
from slipway.progress.tracking import Position
from slipway.reasons import REASONS
from slipway.settings import Settings
from slipway.sizes import format_size
from slipway.terminal.columns import Column, FittedTable, Prose
from slipway.terminal.console import print_json, show, unbroken_line
from slipway.texts import counted

LoadFlags = Callable[[Mapping[str, str | None]], LoadedConfiguration]
"""Loads the settings of one export, given its flags beside those that all share."""

_STATES = {"succeeded": "green", "failed": "red", "impossible": "red", "passed": "green", "not run": "yellow"}
_RANKS = (0, 0, 0, 1, 2, 3, 1)


def show_batch(
    folder: Path,
    load: LoadFlags,
    settings: Settings,
    *,
    as_json: bool,
    progress: ProgressForm,
    bring_sources: bool,
    request_id: str,
) -> int:
    """Run the exports of a folder, print their results, and return the exit code of the failure that decides."""
    planned = _plan(folder, load, settings, bring_sources=bring_sources)
    level = next((each.loaded.configuration.log.level for each in planned.exports if each.loaded), "info")
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(settings))
        batch = Batch(
            planned,
            settings,
            _displays(stack, settings, progress, level),
            bring_sources=bring_sources,
            request_id=request_id,
        )
        result = batch.run()
    if as_json:
        print_json(result.to_json())
    else:
        show(*_results(result))
    return result.exit_code


def show_batch_plan(folder: Path, load: LoadFlags, settings: Settings, *, as_json: bool, bring_sources: bool) -> int:
    """Print what a batch would do; return the exit code of the error that decides, or 0."""
    planned = _plan(folder, load, settings, bring_sources=bring_sources)
    if as_json:
        print_json(planned.to_json())
    else:
        show(*_plans(planned))
    error = planned.error()
    return REASONS[error.reason].category.exit_code if error else 0


def _plan(folder: Path, load: LoadFlags, settings: Settings, *, bring_sources: bool) -> BatchPlan:
    subjects, left_out = find_subjects(folder)
    return plan_batch(
        subjects,
        left_out,
        lambda subject: load(subject.flags({})),
        settings,
        bring_sources=bring_sources,
        where=str(folder),
    )


def _displays(stack: contextlib.ExitStack, settings: Settings, form: ProgressForm, level: str) -> OpenObserver:
    """Return the function that opens the display of an export: one after the other here, or a row of one at a coordinator."""
    if settings.coordinator:
        overview = Overview(stack.enter_context(open_display(form, level=level, resuming=True)))
        return lambda position: contextlib.nullcontext(overview.open(position.run, position.number, position.of))

    @contextlib.contextmanager
    def open_one(position: Position) -> Iterator[Observer]:
        with open_display(form, level=level, resuming=True) as display:
            display.title(f"export {position.number} of {position.of}: {position.run}")
            yield display

    return open_one


def _results(batch: BatchResult) -> Iterator[RenderableType]:
    """Show a row for each output, what failed and why, what was left out, and the sum."""
    columns = (
        Column(name, rank=rank, right=name in ("size", "KL", "seconds"), style="bold" if name == "export" else "")
        for name, rank in zip(HEADINGS, _RANKS, strict=True)
    )
    table = FittedTable(*columns)
    for row in rows(batch):
        table.add_row(*(Text(cell, style=_STATES.get(cell.partition(" [")[0], "")) for cell in row))
    yield table
    yield Text()
    for entry in batch.failed:
        failure = entry.failure()
        assert failure is not None
        yield Prose(f"{entry.state} ", "red", f"{entry.name}: [{failure.reason}] {failure}")
    yield from _left_out(batch.left_out)
    yield from (Prose("warning ", "yellow", warning) for warning in batch.warnings)
    done = len(batch) - len(batch.failed)
    yield Text(f"{done} of {counted(len(batch), 'export')} succeeded", style="green" if batch.success else "bold red")
    if batch.table:
        yield unbroken_line("table ", batch.table)


def _plans(planned: BatchPlan) -> Iterator[RenderableType]:
    """Show a row for each export, why some cannot run, and the sums."""
    table = FittedTable(
        Column("export", style="bold"),
        Column("makes", wrap=True),
        Column("tasks", rank=2, right=True),
        Column("size", rank=1, right=True),
        Column("time", rank=1, right=True),
    )
    for each in planned.exports:
        table.add_row(each.subject.name, *_plan_cells(each))
    sums = (format_size(planned.stored_bytes + planned.delivered_bytes), about(planned.expected_seconds))
    table.add_row("all", f"{counted(len(planned.exports), 'export')}", "", f"≤ {sums[0]}", sums[1])
    yield table
    yield Text()
    yield findings_table(planned.findings)
    yield Text()
    for each in planned.exports:
        if each.error is not None:
            yield Prose("impossible ", "red", f"{each.subject.name}: [{each.error.reason}] {each.error}")
    warnings = dict.fromkeys(
        (warning, each.subject.name) for each in planned.exports if each.plan for warning in each.plan.warnings
    )
    by_text: dict[str, list[str]] = {}
    for warning, name in warnings:
        by_text.setdefault(warning, []).append(name)
    for warning, names in by_text.items():
        whose = "" if len(names) == len(planned.exports) else f"{', '.join(names)}: "
        yield Prose("warning ", "yellow", f"{whose}{warning}")
    yield from _left_out(planned.left_out)
    yield Text("slipway export RUN --plan shows the tasks and settings of one; --json those of all", style="dim")


def _plan_cells(each: PlannedExport) -> tuple[str, str, str, str]:
    if each.error is not None:
        return "impossible", "", "", ""
    if each.plan is None:  # workers read its sources
        return "", "", "", ""
    checked = each.plan.checked
    size = format_size(checked.stored_bytes + checked.delivered_bytes)
    return ", ".join(each.plan.formats), str(len(each.plan.tasks)), f"≤ {size}", about(each.plan.expected_seconds)


def _left_out(entries: Iterable[LeftOut]) -> Iterator[RenderableType]:
    return (Prose("left out ", "dim", f"{each.name}: {each.why}") for each in entries)
