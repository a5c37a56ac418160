"""Check before anything runs that disk, memory and this machine's libraries are sufficient for a plan.

Sizes are estimated from the number of weights. They are upper bounds, because artifacts that the store already has are not made again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from slipway.errors import ConfigurationError, ModelExportError
from slipway.formats.registry import format_of_output, split_output, translate_format_errors
from slipway.formats.settings import FormatSettings
from slipway.formats.tasks import PlannedTask
from slipway.machine.cgroup import ControlGroup, available_memory
from slipway.machine.doctor import StageHealth, stage_health
from slipway.model.adapters.saved import is_plain_lora
from slipway.model.base_format import prepared_sizes
from slipway.model.configuration import ModelConfig
from slipway.model.model_files import CONFIG
from slipway.model.weights.parts import number_of_layers
from slipway.planning.memory import list_left_out, memory_bytes
from slipway.planning.plan import tasks_in_reserve
from slipway.planning.references import producers
from slipway.registry import known_stage, plays
from slipway.sizes import ModelSize, format_size
from slipway.stage import Role, Stage, StageParams
from slipway.texts import one_line
from slipway.validation.inputs import ADAPTER

_WEIGHTS = {".safetensors", ".bin"}


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and its result.

    Attributes:
        check: Subject of the check, such as ``disk: SLIPWAY_HOME`` or ``stage: merge``.
        verdict: Its result.
        message: Details with the figures.
        remedy: What to do; empty if the check passed.
        reason: Reason of the command's error, if the verdict is an error.
    """

    check: str
    verdict: Verdict
    message: str
    remedy: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Preflight:
    """All checks, and the estimated sizes behind them.

    Attributes:
        findings: The checks.
        disk_needed_bytes: Size of everything that the plan makes.
        stored_bytes: The same, with the base if the store cannot link its files.
        delivered_bytes: Size of the delivered copies.
        task_bytes: The same by task.
        memory_needed_bytes: Memory of the stage that needs most.
        task_seconds: Expected time of each task on two cores, without those in reserve and those that are not run.
    """

    findings: tuple[Finding, ...]
    disk_needed_bytes: int = 0
    stored_bytes: int = 0
    delivered_bytes: int = 0
    task_bytes: dict[str, int] | None = None
    memory_needed_bytes: int = 0
    task_seconds: dict[str, float] | None = None

    @property
    def expected_seconds(self) -> float:
        """Return the time of all tasks, one after another."""
        return sum((self.task_seconds or {}).values())

    def error(self) -> ModelExportError | None:
        """Return the error of the first check that makes the export impossible; None if none does."""
        for finding in self.findings:
            if finding.verdict is Verdict.ERROR:
                return ModelExportError(
                    f"{finding.check}: {finding.message}", reason=finding.reason, remedy=finding.remedy
                )
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the checks as JSON-ready data."""
        return asdict(self)


def preflight(
    tasks: Sequence[PlannedTask],
    *,
    base: Path,
    adapter: Path | None = None,
    config: ModelConfig | None = None,
    sections: Mapping[str, FormatSettings] = MappingProxyType({}),
    home: Path,
    output: Path,
    here: bool = True,
) -> Preflight:
    """Check a plan against this machine.

    Args:
        tasks: The plan.
        base: Folder of the base model.
        adapter: Folder of the checkpoint.
        config: Configuration of the merged model, if it is of another class than the base.
        sections: Settings of the formats; one that is not among them has its defaults.
        home: Folder of the store.
        output: Folder in which the output directory is made.
        here: Whether stages run on this machine; otherwise only the disk is checked.
    """
    size = model_size(base)
    # Only a merge of plain LoRA can leave its weights out; another task decides by its parameters alone.
    written = adapter is not None and not is_plain_lora(adapter)
    made = {task.id: task_bytes(_with_stored_weights(task) if written else task, size, sections) for task in tasks}
    calls, refused = _read_parameters(tasks)
    model = _read_configuration(base, config)
    memory = memory_bytes(tasks, size)
    layers = (number_of_layers(model) or 1) if model.mixes_experts else 0
    least = memory_bytes(tasks, size, least=True, layers_of_experts=layers)
    stored, delivered = _stored_bytes(made, base=base, home=home), sum(made[task.id] for task in tasks if task.format)
    findings = [*_find_unwritable("SLIPWAY_HOME", home), *_find_unwritable("output", output)]
    seconds = _expected_seconds(calls, made, size=size, config=model)
    findings += [
        *_advice(calls),
        *refused,
        *_descriptions(calls, model),
        *_refusals(calls, model),
        *_examine_adapter(calls, adapter),
        *check_disk(stored, delivered, home=home, output=output),
    ]
    if here:
        findings += [_check_memory(memory, least, tasks), _describe_time(sum(seconds.values())), *_stages(tasks)]
    return Preflight(
        findings=tuple(findings),
        disk_needed_bytes=sum(made.values()),
        stored_bytes=stored,
        delivered_bytes=delivered,
        task_bytes=made,
        memory_needed_bytes=memory,
        task_seconds=seconds,
    )


def model_size(folder: Path) -> ModelSize:
    """Measure the model in a folder by the headers of its weights, as if it were stored in plain 16- or 32-bit weights."""
    tensors = prepared_sizes(folder)
    companions = [path for path in folder.iterdir() if path.suffix not in _WEIGHTS and path.is_file()]
    return ModelSize(
        weights=sum(count for count, _ in tensors),
        weight_bytes=sum(nbytes for _, nbytes in tensors),
        largest=max((count for count, _ in tensors), default=0),
        largest_bytes=max((nbytes for _, nbytes in tensors), default=0),
        companion_bytes=sum(path.stat().st_size for path in companions),
    )


def task_bytes(task: PlannedTask, size: ModelSize, sections: Mapping[str, FormatSettings]) -> int:
    """Return an upper estimate of the size of a task's output, by the format that it delivers or otherwise by its stage."""
    delivered = format_of_output(task.format)
    if delivered is not None and delivered.output_bytes is not None:
        with translate_format_errors(delivered):
            settings = sections.get(delivered.name) or delivered.settings()
            return int(delivered.output_bytes(settings, split_output(task.format)[1], size))
    known = task.known()
    return known[0].forecast.output_bytes(known[1], size) if known else 0


def _with_stored_weights(task: PlannedTask) -> PlannedTask:
    """Return a merge that writes its weights even if it was to leave them out."""
    if not plays(task.stage, Role.MERGE) or "weights" not in task.params:
        return task
    return replace(task, params={**task.params, "weights": "stored"})


class _Call(NamedTuple):
    """A task whose stage is installed here, with its parameters as the stage's own type."""

    task: PlannedTask
    stage: Stage[Any]
    params: StageParams


def _expected_seconds(
    calls: Sequence[_Call], made: Mapping[str, int], *, size: ModelSize, config: ModelConfig
) -> dict[str, float]:
    """Return the time of each task on two cores, by the effort of its stage, without tasks in reserve and those that will not run."""
    tasks = [call.task for call in calls]
    left_out = tasks_in_reserve(tasks)
    for task, stage, params in calls:
        judges = plays(task.stage, Role.VALIDATION)
        if not judges and (
            left_out & set(producers(task.inputs)) or (config and stage.forecast.refuses(params, config))
        ):
            left_out.add(task.id)
    outputs = [
        each for each in tasks if each.format and each.id not in left_out and not plays(each.stage, Role.VALIDATION)
    ]
    judged = sum(made[each.id] for each in outputs)
    seconds = {}
    for task, stage, params in calls:
        judges = plays(task.stage, Role.VALIDATION)
        work = stage.forecast.work_bytes(params, judged if judges else made[task.id], size)
        if task.id not in left_out:
            seconds[task.id] = stage.effort.expected_seconds(work, times=len(outputs) + 1 if judges else 1)
    return seconds


def _read_parameters(tasks: Sequence[PlannedTask]) -> tuple[list[_Call], list[Finding]]:
    """Return the tasks with their parameters, and an error for each whose parameters its stage refuses."""
    calls, findings = list[_Call](), list[Finding]()
    for task in tasks:
        known = known_stage(task.stage)
        try:
            stage = known and task.call.step(known)
            calls += [] if stage is None else [_Call(task, stage, task.call.params_of(stage))]
        except ConfigurationError as error:
            findings.append(Finding(f"task: {task.id}", Verdict.ERROR, error.message, error.remedy, error.reason))
        except Exception as error:  # noqa: BLE001 - the checks of parameters are the code of the stage's author
            message = f"{task.stage} cannot check its parameters: {type(error).__name__}: {one_line(str(error))}"
            findings.append(Finding(f"task: {task.id}", Verdict.ERROR, message, reason="STAGE_ERROR"))
    return calls, findings


def _advice(calls: Sequence[_Call]) -> list[Finding]:
    """Return the stages' warnings about parameters whose effect will differ from the setting."""
    said = [call.stage.forecast.advice(call.params) for call in calls]
    return [
        Finding(check, Verdict.WARNING, message, remedy) for check, message, remedy in dict.fromkeys(filter(None, said))
    ]


def _descriptions(calls: Sequence[_Call], config: ModelConfig) -> list[Finding]:
    """Return what the stages say about their parameters with this model; parameters that a stage will refuse are an error."""
    findings: list[Finding] = []
    for call in calls if config else ():
        try:
            said = call.stage.forecast.describes(call.params, config)
        except ModelExportError as error:
            check = f"stage: {call.stage.name}"
            findings.append(Finding(check, Verdict.ERROR, error.message, error.remedy, reason=error.reason))
            continue
        findings += [Finding(said[0], Verdict.OK, said[1])] if said else []
    return findings


def _read_configuration(base: Path, config: ModelConfig | None) -> ModelConfig:
    """Return the configuration of the merged model; an empty one, of unknown family, for a base without ``config.json``."""
    if config is not None:
        return config
    return ModelConfig.read(base) if (base / CONFIG).is_file() else ModelConfig({})


def _refusals(calls: Sequence[_Call], config: ModelConfig) -> list[Finding]:
    """Return a warning for each stage that does not support this family of models, or not with these parameters, and will not run."""
    refused = dict.fromkeys(
        (call.task.stage, why, call.task.fallback)
        for call in sorted(calls, key=lambda call: call.task.stage)
        if config and (why := call.stage.forecast.refuses(call.params, config))
    )
    remedy = "disable its formats, so that the export succeeds"
    return [
        Finding(f"stage: {name}", Verdict.WARNING, f"not run: {why}, so {fallback}")
        if fallback
        else Finding(f"stage: {name}", Verdict.WARNING, f"not run: {why}", remedy, "FAMILY_UNSUPPORTED")
        for name, why, fallback in refused
    ]


def _examine_adapter(calls: Sequence[_Call], adapter: Path | None) -> list[Finding]:
    """Return the stages' warnings about the adapter; an adapter that a stage will refuse is an error."""
    findings: dict[Finding, None] = {}
    for call in calls:
        if adapter is None or f"source:{ADAPTER}" not in call.task.inputs.values():
            continue
        check = f"stage: {call.task.stage}"
        try:
            said = call.stage.forecast.examines(call.params, adapter)
        except ModelExportError as error:
            findings[Finding(check, Verdict.ERROR, error.message, error.remedy, reason=error.reason)] = None
        else:
            findings |= {Finding(check, Verdict.WARNING, message): None for message in said}
    return list(findings)


def _stored_bytes(made: Mapping[str, int], *, base: Path, home: Path) -> int:
    apart = base.stat().st_dev != _existing_folder(home).stat().st_dev  # otherwise the store links or clones the files
    return sum(made.values()) + (sum(path.stat().st_size for path in base.iterdir() if path.is_file()) if apart else 0)


def check_disk(stored: int, delivered: int, *, home: Path, output: Path) -> list[Finding]:
    """Check the room for stored results and delivered copies, in bytes; the copies may be clones, which need none."""
    home, output = _existing_folder(home), _existing_folder(output)
    if home.stat().st_dev != output.stat().st_dev:
        return [_check_space("disk: SLIPWAY_HOME", stored, home), _check_space("disk: output", delivered, output)]
    return [_check_space("disk: SLIPWAY_HOME", stored + delivered, home)]


def _find_unwritable(name: str, folder: Path) -> list[Finding]:
    """Find a folder that cannot be created or written, now and not after hours of work."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        message = f"{folder} cannot be a folder: {existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        message = f"{existing} is not writable"
    else:
        return []
    remedy = f"make it writable, or choose another {'output.directory' if name == 'output' else name}"
    return [Finding(f"write: {name}", Verdict.ERROR, message, remedy, "FILE_ERROR")]


def _check_space(check: str, needed: int, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    message = f"at most {format_size(needed)} needed, {format_size(free)} free at {folder}"
    if needed <= free:
        return Finding(check, Verdict.OK, message)
    return Finding(check, Verdict.WARNING, message, "free space, run slipway cache gc, or choose another folder")


def _check_memory(needed: int, least: int, tasks: Sequence[PlannedTask]) -> Finding:
    available = available_memory(ControlGroup().memory())
    message = f"about {format_size(needed)} needed, {format_size(available)} available"
    if needed <= available:
        return Finding("memory", Verdict.OK, message)
    remedy = "use a machine with more memory, or set validation.enabled: false"
    if least > available:
        return Finding("memory", Verdict.WARNING, message, remedy)
    said = f"{message}: {list_left_out(tasks)}"
    return Finding("memory", Verdict.WARNING, said, "use a machine with more memory for these")


def _describe_time(seconds: float) -> Finding:
    minutes = max(1, round(seconds / 60))
    said = f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
    message = f"about {said} on two cores, one task after another; less for what the store has already"
    return Finding("time", Verdict.OK, message)


def _stages(tasks: Sequence[PlannedTask]) -> list[Finding]:
    """Return a finding for each stage; one that cannot run is an error if no output could be made without it."""
    by_name = {name: stage_health(name) for name in sorted({task.stage for task in tasks})}
    lost: set[str] = set()
    for task in tasks:
        if not by_name[task.stage].available or lost & set(producers(task.inputs)):
            lost.add(task.id)
    outputs = [task for task in tasks if format_of_output(task.format) is not None]
    needed = bool(outputs) and all(task.id in lost for task in outputs)
    return [_stage(health, needed=needed and _delivers(health.name, tasks)) for health in by_name.values()]


def _delivers(stage: str, tasks: Sequence[PlannedTask]) -> bool:
    """Return whether an output is made by this stage, or from what it makes."""
    made = {task.id for task in tasks if task.stage == stage}
    for task in tasks:
        made |= {task.id} if made & set(producers(task.inputs)) else set()
    return any(task.id in made and format_of_output(task.format) is not None for task in tasks)


def _stage(health: StageHealth, *, needed: bool) -> Finding:
    check = f"stage: {health.name}"
    versions = ", ".join(f"{p.name} {p.version}".strip() for p in health.providers if p.available)
    if health.available:
        return Finding(check, Verdict.OK, versions or "ready")
    message = "cannot run on this machine; other formats are still made"
    # All other tasks depend on the first of these.
    if needed or plays(health.name, Role.COMBINATION, Role.PREPARATION, Role.MERGE):
        return Finding(check, Verdict.ERROR, "cannot run on this machine", health.missing, "UNSUPPORTED")
    return Finding(check, Verdict.WARNING, message, health.missing)


def _existing_folder(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.is_dir())
