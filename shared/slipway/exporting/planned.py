"""What an export would do: its sources, its tasks, and whether this machine can run them. Nothing runs, and nothing is written."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from slipway.artifacts import LocalStore
from slipway.base_match import BaseMatchStatus
from slipway.client.calls import DEFAULT_PROJECT
from slipway.configuration import ExportConfiguration, LoadedConfiguration
from slipway.errors import ModelExportError
from slipway.export_sources.discovery import Sources, find_sources
from slipway.export_sources.naming import source_settings
from slipway.exporting.destinations import Reached, check_destinations
from slipway.exporting.opening import artifacts_at
from slipway.formats.tasks import PlannedTask
from slipway.model.configuration import ModelConfig
from slipway.planning.calibration import SOURCE as CALIBRATION
from slipway.planning.plan import OPTIONAL_SOURCES, more_adapters, plan, tasks_in_reserve
from slipway.planning.precedents import Precedent, precedent_key, with_precedent
from slipway.planning.preflight import Finding, Preflight, Verdict, preflight
from slipway.planning.references import VALIDATION
from slipway.representation import html_table, named_few, preformatted, three_lines
from slipway.settings import Settings
from slipway.settings.s3 import SCHEME
from slipway.sources import SourceFolders
from slipway.texts import counted
from slipway.validation.inputs import OWN_TEXT, TEST_INPUTS


class Plan(ABC):
    """What would be done, and whether it can be."""

    @property
    def possible(self) -> bool:
        """Whether nothing makes it impossible."""
        return self.error() is None

    @abstractmethod
    def error(self) -> ModelExportError | None:
        """Return the error that makes it impossible; None if nothing does."""

    def require(self) -> Self:
        """Return this plan if it can be carried out.

        Raises:
            ModelExportError: :meth:`error`.
        """
        error = self.error()
        if error is not None:
            raise error
        return self


@dataclass(frozen=True, repr=False)
class ExportPlan(Plan):
    """What an export would do, as ``slipway export --plan`` shows it; :meth:`to_json` returns what ``--json`` prints.

    Attributes:
        loaded: The configuration, with the source of each setting and warnings.
        sources: The sources that were found; None if one cannot be used, which is then an error of ``checked``.
        checked: The checks of this machine.
        tasks: The tasks, in the order in which they are planned.
    """

    loaded: LoadedConfiguration
    sources: Sources | None
    checked: Preflight
    tasks: tuple[PlannedTask, ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """The outputs that it would deliver."""
        reserve = tasks_in_reserve(self.tasks)
        names = (task.format for task in self.tasks if task.id not in reserve)
        return tuple(name for name in names if name and name != VALIDATION)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about settings and sources, and those of the checks."""
        of_sources = self.sources.warnings if self.sources else ()
        of_checks = (str(finding) for finding in self.checked.findings if finding.verdict is Verdict.WARNING)
        return tuple(dict.fromkeys((*self.loaded.warnings, *of_sources, *of_checks)))

    @property
    def expected_seconds(self) -> float:
        """About how long the work takes on two cores, one task after another; 0 if unknown."""
        return self.checked.expected_seconds

    def error(self) -> ModelExportError | None:
        """Return the error of the first check that makes the export impossible; None if none does."""
        return self.checked.error()

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        loaded, sources = self.loaded, self.sources
        return {
            "configuration": loaded.configuration.model_dump(mode="json"),
            "origins": dict(loaded.origins),
            "warnings": list(self.warnings),
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
            "tasks": [asdict(task) for task in self.tasks],
            "preflight": self.checked.to_json(),
        }

    def __repr__(self) -> str:
        error = self.error()
        time = self._time()
        first = f"ExportPlan: {self.sources.title if self.sources else 'the sources cannot be used'}"
        what = f"{counted(len(self.tasks), 'task')}{f', {time}' if time else ''}, makes {named_few(self.formats)}"
        last = (
            f"impossible: [{error.reason}] {error}" if error else f"possible; {counted(len(self.warnings), 'warning')}"
        )
        return three_lines(first, what, last)

    def _repr_html_(self) -> str:
        tasks = ((task.id, task.format, task.stage) for task in self.tasks)
        findings = (
            (finding.check, finding.verdict.value, f"{finding.message}; {finding.remedy}".removesuffix("; "))
            for finding in self.checked.findings
        )
        tables = (html_table(("task", "delivers", "stage"), tasks), html_table(("preflight", "", "found"), findings))
        return preformatted(repr(self)) + "".join(tables)

    def _time(self) -> str:
        """Return the time as the checks say it; empty if they do not."""
        said = next((finding.message for finding in self.checked.findings if finding.check == "time"), "")
        return said.partition(",")[0]


def make_plan(loaded: LoadedConfiguration, settings: Settings, *, reached: Reached | None = None) -> ExportPlan:
    """Return what an export would do; what makes it impossible is among the checks.

    Args:
        loaded: The configuration with its warnings.
        settings: Settings of this machine.
        reached: What was found before about places to publish to.
    """
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
            tasks = plan(configuration, names, source_formats=sources.formats, weight_bytes=sources.weight_bytes)
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
                    *check_destinations(configuration, settings, reached),
                ),
            )
    except ModelExportError as error:
        finding = Finding("sources", Verdict.ERROR, error.message, error.remedy, error.reason)
        return ExportPlan(loaded, None, Preflight((finding,)), tuple(tasks))
    return ExportPlan(loaded, sources, checked, tuple(tasks))


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
