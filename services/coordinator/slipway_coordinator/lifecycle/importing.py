"""Plan exports whose sources must be imported: one task imports them, and the rest is planned once they are artifacts. Pure.

The plan depends on what is in the base (it may need preparation), so the other tasks wait until the import has succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from slipway.configuration import ExportConfiguration, parse
from slipway.errors import Failure, QuantizationError, ServiceError, StageError
from slipway.export_sources.naming import source_settings
from slipway.formats.tasks import PlannedTask
from slipway.planning.calibration import SOURCE as CALIBRATION
from slipway.planning.calibration import check_texts_apart
from slipway.planning.plan import OPTIONAL_SOURCES, check_formats, plan
from slipway.planning.references import Output, Source
from slipway.registry import IMPORT
from slipway.texts import one_line, quoted
from slipway.validation.inputs import HELDOUT, TEST_INPUTS
from slipway_coordinator.lifecycle.records import ExportRecord, TaskRecord

TASK = "import"
_LABEL_NAME_LENGTH, _LABEL_LENGTH = 100, 500


def import_task(
    configuration: ExportConfiguration, given: Mapping[str, str], imports: Mapping[str, str]
) -> PlannedTask:
    """Plan the task that imports sources. Sources that are artifacts already are its inputs, to be inspected with the others."""
    document = configuration.model_dump(mode="json")
    where = source_settings(configuration) | dict(given)
    at = {name: where[name] if name in {*given, *imports} else "" for name in OPTIONAL_SOURCES}
    adapters = [where[f"adapter-{number:02}"] for number, _ in enumerate(configuration.combination.adapters, 2)]
    sources: dict[str, Any] = {
        "base_model": document["base_model"] | {"name": where["base"]},
        "checkpoint": document["checkpoint"] | {"path": where.get("adapter", "")},
        "combination": document["combination"] | {"adapters": adapters},
        "optimization": {"calibration": at[CALIBRATION]},
        "validation": document["validation"] | {"heldout": at[HELDOUT], "test_input_samples": at[TEST_INPUTS]},
    }
    inputs = {name: str(Source(name)) for name in sorted(given)}
    return PlannedTask(TASK, IMPORT, {"sources": sources, "imports": dict(sorted(imports.items()))}, inputs)


class _Facts(BaseModel):
    """Facts of an import that the plan and the export's labels use."""

    model_config = ConfigDict(strict=True, extra="ignore")

    urls: dict[str, str] = {}
    labels: dict[str, str] = {}
    source_formats: dict[str, str] = {}
    weight_bytes: int = Field(default=0, ge=0)


def check_texts(record: ExportRecord, outputs: Mapping[str, str]) -> Failure | None:
    """Return the failure of an export that imports the same text for calibration and comparison; else None."""
    try:
        check_texts_apart(parse(record.configuration), {**record.sources, **outputs})
    except QuantizationError as error:
        return error.failure()
    return None


def check_outputs(task: TaskRecord, outputs: Mapping[str, str], facts: Mapping[str, Any]) -> Failure | None:
    """Return the failure of an import that brought other sources than requested, or other content than before; else None."""
    wanted = set(task.params["imports"])
    if set(outputs) != wanted:
        return _invalid_result(
            f"the import brought {quoted(sorted(outputs)) if outputs else 'nothing'} instead of {', '.join(sorted(wanted))}"
        )
    try:
        import_facts = _Facts.model_validate(facts)
        check_formats({*wanted, *task.inputs}, import_facts.source_formats)
    except ServiceError as error:
        return _invalid_result(error.message)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in ("facts", *first["loc"]))
        return _invalid_result(f"{quoted(place)} of the import is {quoted(first['input'])}: {first['msg']}")
    strange = sorted(set(import_facts.urls) - wanted)
    if strange:
        return _invalid_result(f"facts.urls of the import has {quoted(strange[0])}, which is not one of its sources")
    before = {name: pin["digest"] for name, pin in task.params.get("pinned", {}).items()}
    changed = sorted(name for name, digest in before.items() if outputs[name] != digest)
    if changed:
        return StageError(
            f"{', '.join(changed)} changed since the export began",
            reason="SOURCE_CHANGED",
            remedy="create a new export",
            about={"source": changed[0]},
        ).failure()
    return None


def _invalid_result(what: str) -> Failure:
    return StageError(what, reason="RESULT_INVALID", remedy="run workers of the coordinator's version").failure()


def with_sources(record: ExportRecord, task: TaskRecord) -> ExportRecord:
    """Return the export after its import: with the sources' digests and names, and the remaining tasks.

    Args:
        record: The export.
        task: Its import task, which has succeeded.
    """
    if len(record.tasks) > 1:  # imported again, because the store lost an artifact: the plan exists
        return record.with_task(task)
    facts = _Facts.model_validate(task.facts)
    pinned = {name: {"url": facts.urls.get(name, ""), "digest": digest} for name, digest in task.outputs.items()}
    task = task.with_(params={**task.params, "pinned": pinned})
    sources = {**record.sources, **task.outputs}
    planned = plan(
        parse(record.configuration),
        sources,
        source_formats=facts.source_formats,
        weight_bytes=facts.weight_bytes,
    )
    following = (TaskRecord.from_plan(each) for each in planned)
    return record.with_(
        sources=dict(sorted(sources.items())),
        labels=dict(sorted({**_labels(facts.labels), **record.labels}.items())),
        tasks=(task, *(each.with_(inputs=_use_outputs(each.inputs, task)) for each in following)),
    )


def _use_outputs(inputs: Mapping[str, str], task: TaskRecord) -> dict[str, str]:
    """Replace imported sources by references to the import's outputs, so that it runs again if the store loses one."""
    made = {str(Source(name)): str(Output(task.id, name)) for name in task.outputs}
    return {name: made.get(reference, reference) for name, reference in inputs.items()}


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the sources' names at their origin, made safe to show."""
    return {one_line(name[:_LABEL_NAME_LENGTH]): one_line(value[:_LABEL_LENGTH]) for name, value in labels.items()}
