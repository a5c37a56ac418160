"""The capabilities of this machine: every stage with its libraries, the possible formats, and the machine itself."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from slipway.distribution import install_command, own_version
from slipway.errors import ModelExportError
from slipway.formats.contract import Format
from slipway.formats.registry import formats, refused_formats, translate_format_errors
from slipway.formats.settings import every_choice
from slipway.formats.steps import plain_request, stages_of, steps_before
from slipway.machine.cgroup import ControlGroup, available_memory, machine_memory, usable_cores
from slipway.machine.libraries import install_remedy, is_runnable, with_install_lines
from slipway.machine.processors import first_gpu, processor_name
from slipway.registry import load_stage, stage_names, stage_of
from slipway.settings import Settings
from slipway.stage import Provider, Role


@dataclass(frozen=True)
class StageHealth:
    """Whether one stage can run here.

    Attributes:
        name: Stage.
        available: Whether it can run.
        providers: Its libraries and devices.
        missing: How to make it run; empty if it can.
    """

    name: str
    available: bool
    providers: tuple[Provider, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class FormatHealth:
    """Whether one format can be made here, and why not."""

    name: str
    available: bool
    detail: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine and the process's surroundings; sizes in bytes."""

    slipway: str
    python: str
    platform: str
    processor: str
    cores: int
    memory_bytes: int
    memory_available_bytes: int
    home: str
    home_free_bytes: int
    home_writable: bool
    gpu: str
    gpu_memory_bytes: int


@dataclass(frozen=True)
class DoctorReport:
    """The whole report of ``slipway doctor``."""

    machine: Machine
    stages: tuple[StageHealth, ...]
    formats: tuple[FormatHealth, ...]

    def to_json(self) -> dict[str, Any]:
        """Return this report as JSON-ready data."""
        return asdict(self)


def examine(settings: Settings) -> DoctorReport:
    """Examine this machine; import nothing heavy and change nothing."""
    stages = tuple(stage_health(name) for name in stage_names())
    return DoctorReport(machine=_machine(settings), stages=stages, formats=format_health(stages))


def stage_health(name: str) -> StageHealth:
    """Return whether one installed stage can run here."""
    try:
        stage = load_stage(name)
    except ModelExportError as error:
        return StageHealth(name, available=False, missing=f"{install_command(name)} ({error.message})")
    providers = stage.providers()
    available, missing = is_runnable(stage, providers), install_remedy(stage, providers)
    return StageHealth(
        name, available=available, providers=with_install_lines(stage, providers, missing), missing=missing
    )


def format_health(stages: tuple[StageHealth, ...]) -> tuple[FormatHealth, ...]:
    """Return the formats that these stages allow, and the installed formats that cannot be used."""
    by_name = {stage.name: stage for stage in stages}
    outputs = [health for each in formats().values() for health in _outputs_health(each, by_name)]
    validation = stage_of(Role.VALIDATION)
    refused = [FormatHealth(each.name, available=False, detail=str(each.error())) for each in refused_formats()]
    return (*outputs, _format_health(validation.main_output, [validation.name], by_name), *refused)


def _outputs_health(each: Format[Any], by_name: Mapping[str, StageHealth]) -> Iterator[FormatHealth]:
    """Yield a format's plain output, its levels, and each variant that its settings can ask for."""
    request = plain_request(each)
    asked = [(each.name, "", request)]
    if each.levels:
        asked.append((f"{each.name}-<level>", each.levels[0], replace(request, levels=each.levels[:1])))
    try:
        with translate_format_errors(each):
            every = each.settings(**every_choice(each.settings))
            asked += [
                (each.output_name(name), name, replace(request, settings=every)) for name in each.variants.names(every)
            ]
        for output, kind, one in asked:
            with translate_format_errors(each):
                steps = steps_before(tuple(each.plan(one)), each.output_name(kind), model=one.model)
            yield _format_health(output, stages_of(steps), by_name)
    except ModelExportError as error:
        yield FormatHealth(each.name, available=False, detail=str(error))


def _format_health(output: str, needed: Iterable[str], by_name: Mapping[str, StageHealth]) -> FormatHealth:
    lacking = [stage for stage in needed if stage not in by_name or not by_name[stage].available]
    detail = "; ".join(
        f"{stage} cannot run: {by_name[stage].missing if stage in by_name else 'not installed'}" for stage in lacking
    )
    return FormatHealth(output, available=not lacking, detail=detail)


def _machine(settings: Settings) -> Machine:
    group = ControlGroup()
    limited, memory = group.memory(), machine_memory().total_bytes
    existing = next(folder for folder in (settings.home, *settings.home.parents) if folder.is_dir())
    gpu = first_gpu()
    return Machine(
        slipway=own_version(),
        python=f"{platform.python_version()} ({sys.executable})",
        platform=platform.platform(),
        processor=processor_name(),
        cores=usable_cores(group),
        memory_bytes=memory if limited is None else min(memory, limited.limit_bytes),
        memory_available_bytes=available_memory(limited),
        home=str(settings.home),
        home_free_bytes=shutil.disk_usage(existing).free,
        home_writable=os.access(existing, os.W_OK | os.X_OK),
        gpu=f"{gpu.name} ({gpu.architecture})" if gpu else "",
        gpu_memory_bytes=gpu.memory_bytes if gpu else 0,
    )
