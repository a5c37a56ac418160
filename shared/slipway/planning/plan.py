"""Plan the graph of tasks for a configuration. Pure: no store, no clock, no environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from slipway.configuration import ExportConfiguration
from slipway.configuration.calibration import may_read_text, with_method
from slipway.configuration.values import model_name, repository_name
from slipway.errors import ConfigurationError, ServiceError
from slipway.formats.contract import Format
from slipway.formats.registry import runtime_of_output, translate_format_errors
from slipway.formats.settings import FormatSettings
from slipway.formats.tasks import FormatRequest, PlannedTask
from slipway.model.base_format import METHODS, is_base_format
from slipway.planning.calibration import SOURCE as CALIBRATION
from slipway.planning.calibration import Calibrations, names_calibration
from slipway.planning.deferral import defer_weights
from slipway.planning.division import divide
from slipway.planning.references import VALIDATION, by_source_name, producers
from slipway.registry import stage_of
from slipway.requirements import Requirements
from slipway.stage import Role
from slipway.texts import quoted
from slipway.validation.inputs import HELDOUT, OWN_TEXT, TEST_INPUTS, input_of, output_of

REQUIRED_SOURCES = ("adapter", "base")
OPTIONAL_SOURCES = (HELDOUT, TEST_INPUTS, CALIBRATION, OWN_TEXT)


def plan(
    configuration: ExportConfiguration,
    source_names: Collection[str],
    *,
    source_formats: Mapping[str, str] = MappingProxyType({}),
    weight_bytes: int = 0,
) -> tuple[PlannedTask, ...]:
    """Plan the tasks of an export, each after the tasks whose outputs it uses.

    Args:
        configuration: The configuration; only the tasks that it needs are planned.
        source_names: Names of the artifacts from which the export starts: ``base``, ``adapter``, optionally ``heldout``,
            ``test_inputs``, ``calibration`` and ``own_text``, and ``adapter-02`` and so on for each of ``combination.adapters``.
        source_formats: Storage format, by name, of the sources that are not plain 16- or 32-bit safetensors (``slipway.model.base_format``).
        weight_bytes: Size of the base's weights, by which large work is divided; 0 while unknown.

    Raises:
        ServiceError: ``REQUEST_INVALID``: a source is missing, or no task uses one.
    """
    more = more_adapters(configuration)
    _check_sources({*REQUIRED_SOURCES, *OPTIONAL_SOURCES, *more}, source_names)
    check_formats(source_names, source_formats)
    plain = is_plain(configuration, source_names)
    missing = [name for name in (*REQUIRED_SOURCES, *more) if name not in source_names and not plain]
    if names_calibration(configuration) and CALIBRATION not in source_names:
        missing.append(CALIBRATION)
    if missing:
        raise ServiceError(
            f"sources lacks {', '.join(missing)}",
            reason="REQUEST_INVALID",
            remedy="push the folder, and name its digest in sources",
        )
    configuration = with_method(configuration, has_text=CALIBRATION in source_names)
    trunk: list[PlannedTask] = []
    if plain:
        adapter, merged = "", _plan_unchanged(configuration)
        base = merged.reference if source_formats.get("base") or configuration.base_model.model_type else "source:base"
    else:
        adapter = _plan_adapter(trunk, configuration, more)
        base = _plan_base(trunk, configuration, source_formats.get("base", ""))
        merged = _plan_merge(configuration, base=base, adapter=adapter)
    calibrations = Calibrations(configuration, source_names, model=merged.reference)
    of_formats: list[PlannedTask] = []
    for each, section in configuration.formats.enabled():
        taken = {task.id for task in (*trunk, merged, *of_formats)} | calibrations.ids
        of_formats += format_tasks(
            each,
            section,
            configuration,
            model=merged.reference,
            base=base,
            adapter=adapter,
            taken=taken,
            calibrations=calibrations,
        )
    others = [*calibrations.used(of_formats), *of_formats]
    tasks = [*trunk, *([merged] if merged.format or _is_read(merged, others) else []), *others]
    compared = configuration.validation.enabled and configuration.validation.compare_outputs
    tasks = defer_weights(tasks, compared=compared)
    if configuration.validation.enabled:
        tasks += _plan_validation(configuration, source_names, base=base, adapter=adapter, tasks=tasks)
    return divide(tasks, split_bytes=configuration.execution.split_bytes, weight_bytes=weight_bytes)


def tasks_in_reserve(tasks: Sequence[PlannedTask]) -> set[str]:
    """Return the ids of the tasks that run only if a recovery rule needs their output."""
    asked = {name for task in tasks for name in producers(task.reserve)}
    reserved: set[str] = set()
    for task in reversed(tasks):
        users = {each.id for each in tasks if task.id in producers(each.inputs)}
        if not task.format and users <= reserved and (users or task.id in asked):
            reserved.add(task.id)
    return reserved


def _is_read(task: PlannedTask, others: Sequence[PlannedTask]) -> bool:
    """Return whether another task uses a task's output, or may use it in reserve."""
    return any(task.reference in (*other.inputs.values(), *other.reserve.values()) for other in others)


def is_plain(configuration: ExportConfiguration, source_names: Collection[str]) -> bool:
    """Return whether a model is exported as it is: there is a base, and no checkpoint is named or brought."""
    named = configuration.checkpoint.path or configuration.combination.adapters
    return not named and "base" in source_names and "adapter" not in source_names


def _check_sources(known: Collection[str], names: Collection[str]) -> None:
    """Refuse sources that no task uses."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ServiceError(
            f"sources has {quoted(unknown[0])}, which this configuration does not use",
            reason="REQUEST_INVALID",
            remedy=f"it uses {', '.join(sorted(known))}",
            about={"field": "sources"},
        )


def check_formats(names: Collection[str], formats: Mapping[str, str]) -> None:
    """Refuse a storage format that is unknown, or that belongs to no source.

    Args:
        names: Names of the sources.
        formats: Storage format by source.

    Raises:
        ServiceError: ``REQUEST_INVALID``.
    """
    for name, stored_as in sorted(formats.items()):
        if name not in names:
            what, remedy = f"source_formats has {quoted(name)}, which is not a source", "use a name of sources"
        elif stored_as and not is_base_format(stored_as):
            what, remedy = f"source_formats[{name}] is {quoted(stored_as)}", f"use pickle, tekken, {', '.join(METHODS)}"
        else:
            continue
        raise ServiceError(what, reason="REQUEST_INVALID", remedy=remedy, about={"field": "source_formats"})


def more_adapters(configuration: ExportConfiguration) -> tuple[str, ...]:
    """Return the source names of the adapters that are combined with the checkpoint's, in the order of the configuration."""
    return tuple(by_source_name(configuration.combination.adapters))


def _task(role: Role, **fields: Any) -> PlannedTask:
    """Return the task of the stage with a role, named like the stage; ``fields`` are those of :class:`PlannedTask`."""
    stage = stage_of(role)
    return PlannedTask(stage.name, stage.name, output=stage.main_output, **fields)


def _plan_adapter(tasks: list[PlannedTask], configuration: ExportConfiguration, more: tuple[str, ...]) -> str:
    """Return the reference to the adapter that merge and validation use; plan its combination if there are several."""
    if not more:
        return "source:adapter"
    combination = configuration.combination
    task = _task(
        Role.COMBINATION,
        params={
            "weights": list(combination.weights),
            "combination_type": combination.type,
            "density": combination.density,
            "majority_sign_method": combination.majority_sign,
            "seed": combination.seed,
        },
        inputs={name: f"source:{name}" for name in ("adapter", *more)},
    )
    tasks.append(task)
    return task.reference


def _plan_base(tasks: list[PlannedTask], configuration: ExportConfiguration, stored_as: str) -> str:
    """Return the reference to the base that merge and validation use; plan its preparation if it is needed."""
    merge_onto, kind = configuration.base_model.merge_onto, _kind_parameter(configuration)
    if not stored_as and not kind and merge_onto == "original":
        return "source:base"
    task = _task(Role.PREPARATION, params={"merge_onto": merge_onto, **kind}, inputs={"base": "source:base"})
    tasks.append(task)
    return task.reference


def _plan_unchanged(configuration: ExportConfiguration) -> PlannedTask:
    """Plan the model of an export without an adapter: the preparation makes a clean folder of plain weights of any base."""
    params = {"save_tokenizer": _needs_tokenizer(configuration), **_kind_parameter(configuration)}
    return _task(
        Role.PREPARATION, params=params, inputs={"base": "source:base"}, format=_delivered_format(configuration)
    )


def _kind_parameter(configuration: ExportConfiguration) -> dict[str, str]:
    """Return the parameter with the base's kind, where the settings name it."""
    kind = configuration.base_model.model_type
    return {"model_type": kind} if kind else {}


def _needs_tokenizer(configuration: ExportConfiguration) -> bool:
    needed = [may_read_text(configuration)]  # which the tokenizer reads
    for each, section in configuration.formats.enabled():
        with translate_format_errors(each):
            needed.append(bool(each.needs_tokenizer(section)))
    return any(needed)


def _delivered_format(configuration: ExportConfiguration) -> str:
    """Return the format whose unquantized output is the merged model itself; empty if it is not enabled."""
    asked = configuration.formats.enabled()
    return next((each.name for each, _ in asked if each.is_model and configuration.unquantized(each.name)), "")


def _plan_merge(configuration: ExportConfiguration, *, base: str, adapter: str) -> PlannedTask:
    return _task(
        Role.MERGE,
        params={
            "save_tokenizer": _needs_tokenizer(configuration),
            # A spot check is enough: validation compares the merged model with base and adapter on text. It stays the same
            # without validation, so that exports with and without it share the merge.
            "verify": "spot",
            **({"max_shard_bytes": largest} if (largest := configuration.execution.shard_bytes) else {}),
        },
        inputs={"base": base, "adapter": adapter},
        format=_delivered_format(configuration),
    )


def format_tasks(
    each: Format[Any],
    section: FormatSettings,
    configuration: ExportConfiguration,
    *,
    model: str,
    base: str = "",
    adapter: str = "",
    taken: Collection[str] = (),
    calibrations: Calibrations | None = None,
) -> Sequence[PlannedTask]:
    """Plan and check the tasks of one format.

    Args:
        each: The format.
        section: Its settings.
        configuration: The whole configuration.
        model: Reference to the merged model.
        base: Reference to the base model.
        adapter: Reference to the adapter; empty without one.
        taken: Ids of the tasks planned before.
        calibrations: The calibrations of the export; None without any.

    Raises:
        ConfigurationError: ``FORMAT_INVALID``: the format plans tasks that cannot run.
    """
    calibrated = calibrations.references(each) if calibrations else {}
    text = calibrations.text.reference if calibrations else ""
    in_reserve = calibrations is not None and calibrations.in_reserve
    request = FormatRequest(
        name=each.name,
        settings=section,
        levels=configuration.levels(each.name),
        model=model,
        base=base,
        adapter=adapter,
        group_size=each.group_size(configuration.optimization.group_size),
        packed=configuration.optimization.compress_weights,
        profile=configuration.recovery.profile,
        widths=configuration.optimization.width_params,
        calibrations={} if in_reserve else calibrated,
        reserves=calibrated if in_reserve else {},
        text=text if calibrations and calibrations.reads_text else "",
        model_name=model_name(configuration.checkpoint.path, configuration.base_model.name),
        base_model=repository_name(configuration.base_model.name),
        shard_bytes=configuration.execution.shard_bytes,
    )
    known, ids = {model, *calibrated.values(), *filter(None, [base, adapter, text])}, set(taken)
    with translate_format_errors(each):
        names = (*request.levels, *each.variants.names(section))
        wanted = {each.output_name(name) for name in names} | (set() if each.is_model else {each.name})
        tasks = tuple(each.plan(request))
        for task in tasks:
            fault = _find_fault(task, known, ids, wanted)
            if fault:
                raise ConfigurationError(
                    f"the format {each.name} plans a task {task.id!r} that {fault}",
                    reason="FORMAT_INVALID",
                    remedy="install a version of the format that fits this version of slipway",
                    about={"format": each.name, "task": task.id},
                )
            known.add(task.reference)
            ids.add(task.id)
    if configuration.unquantized(each.name):
        return tasks
    return _drop_unread([replace(task, format="") if task.format == each.name else task for task in tasks])


def _drop_unread(tasks: list[PlannedTask]) -> list[PlannedTask]:
    """Drop tasks of a format that deliver nothing and that no other task reads, such as an unquantized output of which no level is made."""
    kept = [task for task in tasks if task.format or _is_read(task, tasks)]
    return kept if len(kept) == len(tasks) else _drop_unread(kept)


def _find_fault(task: PlannedTask, known: set[str], ids: set[str], wanted: set[str]) -> str:
    strangers = sorted({*task.inputs.values(), *task.reserve.values()} - known)
    if strangers:
        return f"uses {strangers[0]!r}, which no earlier task makes"
    if task.id in ids:
        return "has the id of another task"
    return f"delivers {task.format!r}, which was not requested" if task.format and task.format not in wanted else ""


def _longest_texts(configuration: ExportConfiguration) -> list[int]:
    """Return the most tokens that outputs take, for each format whose settings limit them."""
    lengths = (each.longest_text(section) for each, section in configuration.formats.enabled())
    return [most for most in lengths if most]


def _plan_validation(
    configuration: ExportConfiguration,
    source_names: Collection[str],
    *,
    base: str,
    adapter: str,
    tasks: Sequence[PlannedTask],
) -> list[PlannedTask]:
    """Plan the reference, which exports of the same adapter share, and the comparison of all outputs with it."""
    validation = configuration.validation
    given = validation.test_input_samples
    inline = [] if isinstance(given, str) else list(given)
    sources = {"base": base} | ({"adapter": adapter} if adapter else {})
    sources |= {name: f"source:{name}" for name in (HELDOUT, TEST_INPUTS) if name in source_names}
    samples = {
        "effort": validation.effort,
        "test_samples": validation.test_samples,
        **({"longest_text": min(rooms)} if (rooms := _longest_texts(configuration)) else {}),
        **({"continuation_tokens": tokens} if (tokens := validation.continued_tokens) else {}),
        **({"test_inputs": inline} if inline else {}),
    }
    own = {OWN_TEXT: f"source:{OWN_TEXT}"} if adapter and OWN_TEXT in source_names else {}
    reference = [_task(Role.REFERENCE, params=samples, inputs=sources | own)] if validation.compare_outputs else []
    outputs = {input_of(task.format): task.reference for task in tasks if task.format}
    runtimes = [runtime_of_output(output_of(name)) for name in outputs]
    prefers = dict.fromkeys(
        runtime.prefers for runtime in runtimes if runtime is not None and runtime.prefers is not None
    )
    judged = _task(
        Role.VALIDATION,
        params={
            **samples,
            "compare_outputs": validation.compare_outputs,
            "benchmark_performance": validation.benchmark_performance,
            "limits": {level: row.model_dump(exclude_none=True) for level, row in sorted(validation.limits.items())},
        },
        inputs=sources | {task.output: task.reference for task in reference} | outputs,
        format=VALIDATION,
        partial=True,
        requirements=Requirements(prefers=tuple(prefers)),
    )
    return [*reference, judged]
