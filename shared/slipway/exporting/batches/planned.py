"""Plan a batch: load each export's settings, check each against this machine, and all of them together, before anything runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from slipway.configuration import LoadedConfiguration, files_address, render_address, render_name
from slipway.errors import ConfigurationError, Failure, ModelExportError
from slipway.export_sources.discovery import Sources, checkpoint_labels, clean_labels
from slipway.export_sources.naming import sources_to_import
from slipway.exporting.batches.result import TABLE, check_table
from slipway.exporting.batches.subjects import LeftOut, Subject, nothing_to_export
from slipway.exporting.destinations import Reached, require_destinations
from slipway.exporting.opening import artifacts_at
from slipway.exporting.planned import ExportPlan, Plan, make_plan
from slipway.exporting.preparing import find_uploads
from slipway.machine.known_faults import translate_fault
from slipway.planning.preflight import Finding, check_disk
from slipway.publishing.publisher import keeps_versions
from slipway.representation import html_table, named_few, preformatted, three_lines
from slipway.settings import Settings
from slipway.sources import SourceFolders
from slipway.texts import counted

_TIME = "+++time+++"
"""Stands for the time in the names of output directories, which two exports may have in common."""

Load = Callable[[Subject], LoadedConfiguration]


@dataclass(frozen=True, slots=True)
class PlannedExport:
    """One export of a batch before it runs.

    Attributes:
        subject: What it is made of.
        loaded: Its settings; None if they are not valid.
        plan: Its plan; None if there are no valid settings, or if workers import its sources.
        error: Why it cannot run; None if it can.
        output: Its output directory without its time and id; None while the sources are unknown.
        addresses: Where it would be published in place of what is there, without its time and id, as far as that is known.
    """

    subject: Subject
    loaded: LoadedConfiguration | None = None
    plan: ExportPlan | None = None
    error: ModelExportError | None = None
    output: Path | None = None
    addresses: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the export as JSON-ready data."""
        failure = self.error.failure() if self.error else None
        return {
            "name": self.subject.name,
            "run": self.subject.path,
            "possible": failure is None,
            "reason": failure.reason if failure else "",
            "error_message": str(failure) if failure else "",
            "plan": self.plan.to_json() if self.plan else None,
        }


@dataclass(frozen=True, repr=False)
class BatchPlan(Plan):
    """What a batch would do, as ``slipway export --each FOLDER --plan`` shows it; :meth:`to_json` returns what ``--json`` prints.

    Attributes:
        exports: The exports, in their order.
        left_out: Entries of the folder that are not exported.
        findings: Checks of all exports together.
    """

    exports: tuple[PlannedExport, ...]
    left_out: tuple[LeftOut, ...]
    findings: tuple[Finding, ...]

    @property
    def expected_seconds(self) -> float:
        """About how long the work takes on two cores; results that exports share are counted for each."""
        return sum(plan.expected_seconds for plan in self._plans())

    @property
    def stored_bytes(self) -> int:
        """At most what the store receives."""
        return sum(plan.checked.stored_bytes for plan in self._plans())

    @property
    def delivered_bytes(self) -> int:
        """At most the size of all output directories."""
        return sum(plan.checked.delivered_bytes for plan in self._plans())

    def error(self) -> ModelExportError | None:
        """Return the error that decides the exit code; None if every export can run."""
        errors = [each.error for each in self.exports if each.error is not None]
        deciding = Failure.deciding(error.failure() for error in errors)
        return next((error for error in errors if error.failure() == deciding), None)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {
            "possible": self.possible,
            "exports": [each.to_json() for each in self.exports],
            "left_out": [{"name": each.name, "why": each.why} for each in self.left_out],
            "expected_seconds": self.expected_seconds,
            "stored_bytes": self.stored_bytes,
            "delivered_bytes": self.delivered_bytes,
            "findings": [
                {"check": each.check, "verdict": each.verdict.value, "message": each.message, "remedy": each.remedy}
                for each in self.findings
            ],
        }

    def _plans(self) -> list[ExportPlan]:
        return [each.plan for each in self.exports if each.plan is not None]

    def __repr__(self) -> str:
        error = self.error()
        impossible = [each.subject.name for each in self.exports if each.error]
        return three_lines(
            f"BatchPlan: {counted(len(self.exports), 'export')}, {len(self.left_out)} left out",
            named_few([each.subject.name for each in self.exports]),
            f"impossible: {named_few(impossible)}: [{error.reason}] {error}" if error else "possible",
        )

    def _repr_html_(self) -> str:
        rows = ((each.subject.name, each.subject.path, str(each.error or "possible")) for each in self.exports)
        left = ((each.name, each.why) for each in self.left_out)
        tables = html_table(("export", "run", ""), rows), html_table(("left out", "because"), left)
        return preformatted(repr(self)) + "".join(tables)


def plan_batch(
    subjects: Sequence[Subject],
    left_out: Iterable[LeftOut],
    load: Load,
    settings: Settings,
    *,
    bring_sources: bool = False,
    where: str = "",
) -> BatchPlan:
    """Return what a batch would do. An export that is impossible is named; the others may run.

    Args:
        subjects: What is exported.
        left_out: What is not.
        load: Function that loads the settings of the export of one subject.
        settings: Settings of this machine.
        bring_sources: As for an export.
        where: Name of the folder that the subjects were found in; empty for a list, of which nothing is left out.

    Raises:
        ConfigurationError: No export has valid settings, for the same reason; ``OUTPUT_CLASH``: two would be delivered to one folder.
        CheckpointValidationError: Nothing is left to export.
        ArtifactError: ``OUTPUT_EXISTS``: a file of another kind has the table's name.
    """
    loaded = [_load(subject, load) for subject in subjects]
    first = loaded[0].error
    if first is not None and all(each.error is not None and str(each.error) == str(first) for each in loaded):
        raise first
    reached: Reached = {}
    checked = [
        each if each.error else _check_alone(each, settings, reached, bring_sources=bring_sources) for each in loaded
    ]
    exports, bases = _without_bases(checked) if where else (checked, [])
    left = sorted((*left_out, *bases), key=lambda each: each.name)
    if not exports:
        raise nothing_to_export(where or "the list", left)
    _check_outputs(exports)
    _check_addresses(exports)
    folders = {each.output.parent for each in exports if each.output is not None}
    folders |= {Path(each.loaded.configuration.output.directory) for each in exports if each.loaded is not None}
    for folder in sorted(folders):
        check_table(folder)
    made = BatchPlan(tuple(exports), tuple(left), ())
    return BatchPlan(made.exports, made.left_out, tuple(_check_room(made, settings)))


def _load(subject: Subject, load: Load) -> PlannedExport:
    try:
        return PlannedExport(subject, load(subject))
    except ModelExportError as error:
        return PlannedExport(subject, error=error)


def _check_alone(each: PlannedExport, settings: Settings, reached: Reached, *, bring_sources: bool) -> PlannedExport:
    """Check an export; a file that cannot be read makes it impossible, and not the others."""
    try:
        return _check(each, settings, reached, bring_sources=bring_sources)
    except OSError as error:
        return PlannedExport(each.subject, each.loaded, error=translate_fault(error))


def _check(each: PlannedExport, settings: Settings, reached: Reached, *, bring_sources: bool) -> PlannedExport:
    """Check the sources of an export and its plan against this machine; what workers import is not read here."""
    loaded = each.loaded
    assert loaded is not None
    configuration = loaded.configuration
    imports = sources_to_import(configuration) if settings.coordinator and not bring_sources else {}
    if not imports:
        plan = make_plan(loaded, settings, reached=reached)
        names = _names(loaded, _labels(plan.sources)) if plan.sources else {}
        return PlannedExport(
            each.subject, loaded, plan, _error(plan), _output(loaded, names), _addresses(loaded, names)
        )
    try:
        with artifacts_at(settings.coordinator, settings) as store, SourceFolders(settings, store) as folders:
            uploads = find_uploads(configuration, folders, imports)
        require_destinations(configuration, settings, reached)
    except ModelExportError as error:
        return PlannedExport(each.subject, loaded, error=error)
    names = _names(loaded, uploads.labels)
    return PlannedExport(each.subject, loaded, output=_output(loaded, names), addresses=_addresses(loaded, names))


def _error(plan: ExportPlan) -> ModelExportError | None:
    """Return what makes an export impossible, as the export alone would say it; None if it is possible."""
    error = plan.error()
    if error is None or plan.sources is not None:
        return error
    return ModelExportError(error.message.removeprefix("sources: "), reason=error.reason, remedy=error.remedy)


def _labels(sources: Sources) -> dict[str, str]:
    chosen = checkpoint_labels(sources.checkpoint) if sources.checkpoint else {}
    return clean_labels({"model_name": sources.model_name, **chosen})


def _names(loaded: LoadedConfiguration, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the names of an export for its output directory and its addresses; its id differs from all others, and its time may be the same.

    Nothing is returned while the name of the model is unknown.
    """
    if not labels.get("model_name"):
        return {}
    sources = (loaded.configuration.checkpoint.path, loaded.configuration.base_model.name)
    return {
        "model_name": labels["model_name"],
        "checkpoint": labels.get("checkpoint") or labels["model_name"],
        "export_id": f"e-{hashlib.sha256(repr(sources).encode(errors='surrogateescape')).hexdigest()[:18]}",
        "timestamp": _TIME,
    }


def _output(loaded: LoadedConfiguration, names: Mapping[str, str]) -> Path | None:
    """Return the output directory of an export."""
    output = loaded.configuration.output
    return Path(output.directory) / render_name(output.naming_pattern, names) if names else None


def _addresses(loaded: LoadedConfiguration, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses at which an export replaces what was published there before."""
    addresses = [each for each in loaded.configuration.output.destinations if not keeps_versions(each)]
    rendered = (render_address(each, names) for each in addresses if names or "{" not in each)
    return tuple(dict.fromkeys(map(files_address, rendered)))


def _without_bases(exports: list[PlannedExport]) -> tuple[list[PlannedExport], list[LeftOut]]:
    """Leave out the plain models that are the base of an adapter in the batch."""
    owners = {
        each.plan.sources.base.resolve(): each.subject.name
        for each in exports
        if not each.subject.plain and each.plan is not None and each.plan.sources is not None
    }
    kept, left_out = list[PlannedExport](), list[LeftOut]()
    for each in exports:
        owner = owners.get(Path(each.subject.path).resolve()) if each.subject.plain else None
        if owner is None:
            kept.append(each)
        else:
            left_out.append(LeftOut(each.subject.name, f"it is the base model of {owner}"))
    return kept, left_out


def _check_outputs(exports: Iterable[PlannedExport]) -> None:
    """Refuse two exports that would be delivered to one folder, and one whose folder has the table's name."""
    known = [each for each in exports if each.output is not None]
    ordered = sorted(known, key=lambda each: str(each.output))
    for output, group in groupby(ordered, key=lambda each: each.output):
        same = [each.subject for each in group]
        assert output is not None
        if len(same) == 1 and output.name != TABLE:
            continue
        named = named_few([f"{each.name} ({each.path})" for each in same])
        shared = "would be delivered to one folder" if len(same) > 1 else "would have the name of the batch's table"
        raise ConfigurationError(
            f"{named} {shared}, {str(output).replace(_TIME, '{timestamp}')}",
            reason="OUTPUT_CLASH",
            remedy="rename a folder, or set output.naming_pattern to a pattern with {model_name}, {checkpoint} or {export_id}",
            about={"key": "output.naming_pattern", "folder": output},
        )


def _check_addresses(exports: Iterable[PlannedExport]) -> None:
    """Refuse two exports that would be published at one address, where the second would replace the first."""
    by_address: dict[str, list[str]] = {}
    for each in exports:
        for address in each.addresses:
            by_address.setdefault(address, []).append(each.subject.name)
    for address, names in sorted(by_address.items()):
        if len(names) > 1:
            raise ConfigurationError(
                f"{named_few(names)} would be published at one address, {address}",
                reason="OUTPUT_CLASH",
                remedy="write {model_name}, {checkpoint} or {export_id} into output.destinations",
                about={"key": "output.destinations", "destination": address},
            )


def _check_room(made: BatchPlan, settings: Settings) -> list[Finding]:
    """Check the room for all exports together."""
    first = next((each.loaded for each in made.exports if each.plan is not None and each.loaded is not None), None)
    if first is None:
        return []
    output = Path(first.configuration.output.directory)
    return check_disk(made.stored_bytes, made.delivered_bytes, home=settings.home, output=output)
