"""Turn an exception or exit code that ended a stage into a typed failure, with the files and surroundings that explain it.

Files are named by input, as the user knows them: a task's scratch folder is gone by then. Free memory and disk space at the
moment of a failure often explain it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pydantic

from slipway.errors import Failure, ModelExportError, StageError
from slipway.machine.cgroup import ControlGroup, available_memory, machine_memory
from slipway.machine.shortages import (
    MEMORY,
    Shortage,
    address_space_limit,
    is_disk_full,
    memory_shortage,
    memory_shortage_in,
    with_causes,
)
from slipway.sizes import format_size

_DISK = re.compile(r"no space left on device|disk quota exceeded|StorageFull", re.IGNORECASE)
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}

PREFIX = "machine_"


def failure_of(error: BaseException, *, stage: str) -> Failure:
    """Return the failure for an exception inside a stage.

    Libraries report the same condition in many ways (``MemoryError``, ``RuntimeError: DefaultCPUAllocator: can't allocate
    memory``, ``SafetensorError: No space left on device``), so texts are examined as well as types.
    """
    if isinstance(error, ModelExportError):
        return error.failure()
    chain = with_causes(error)
    text = "; ".join(f"{type(link).__name__}: {link}" for link in chain)
    if (short := memory_shortage(error)) is not None:
        return out_of_memory_failure(stage, detail=text, short=short)
    if any(map(is_disk_full, chain)) or _DISK.search(text):
        return disk_full_failure(stage, detail=text)
    if isinstance(error, pydantic.ValidationError):
        return StageError(f"parameters of {stage} are not valid: {error}", reason="PARAMS_INVALID").failure()
    if isinstance(error, OSError) and error.filename:
        about = {"file": Path(str(error.filename)).name}
        return StageError(f"{stage}: {error.strerror}: {error.filename}", reason="FILE_ERROR", about=about).failure()
    remedy = "the log has the traceback; please report it with the versions that slipway doctor prints"
    return StageError(
        f"{stage} stopped with {text[:2000]}", remedy=remedy, about={"exception": type(error).__name__}
    ).failure()


def failure_of_exit(returncode: int, *, stage: str, oom_killed: bool, output: str) -> Failure:
    """Return the failure of a process that ended without reporting a result.

    Args:
        returncode: As in :mod:`subprocess`, negative for a signal.
        stage: The stage that it ran.
        oom_killed: Whether the kernel killed a process for memory meanwhile.
        output: The last lines that it wrote.
    """
    tail = f"; its last output: {output.strip()[-600:]}" if output.strip() else ""
    short = memory_shortage_in(output)
    if short is not None and (returncode > 0 or -returncode in _CRASHES):
        return out_of_memory_failure(stage, detail=output.strip()[-300:], short=short)
    if returncode >= 0:
        return StageError(f"the process of {stage} ended with exit code {returncode} and no result{tail}").failure()
    number = -returncode
    ended_by = (
        signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    )  # real-time signals have no name
    if number == signal.SIGKILL and oom_killed:
        return out_of_memory_failure(stage, detail="the kernel killed its process")
    if number in _CRASHES:
        limit = address_space_limit()
        if limit is not None:  # under a limit, the usual cause is a library that crashes because it gets no memory
            detail = f"{ended_by}, with its address space limited to {format_size(limit)} by ulimit -v{tail}"
            return out_of_memory_failure(stage, detail=detail)
        message = f"native code ended the process of {stage} by {ended_by}{tail}"
        return StageError(message, reason="STAGE_CRASHED", about={"signal": ended_by}).failure()
    message = f"the process of {stage} was ended from outside by {ended_by}{tail}"
    return StageError(message, reason="STAGE_KILLED", about={"signal": ended_by}).failure()


def out_of_memory_failure(stage: str, *, detail: str, short: Shortage = MEMORY) -> Failure:
    """Return the failure of a stage that needed more memory of a kind than was available."""
    message = f"{stage} ran out of {short.of} ({detail[:600]})"
    return StageError(message, reason=short.reason, remedy=short.remedy).failure()


def disk_full_failure(stage: str, *, detail: str) -> Failure:
    """Return the failure of a stage that found no disk space for its output."""
    remedy = "free space on the disk with the work folder (SLIPWAY_SCRATCH), or use a larger disk"
    return StageError(f"{stage} found no space left ({detail[:600]})", reason="DISK_FULL", remedy=remedy).failure()


def with_named_places(failure: Failure, *, inputs: Mapping[str, Path], workdir: Path) -> Failure:
    """Replace a task's paths in the texts of a failure by names such as ``base/config.json``.

    Args:
        failure: The failure.
        inputs: Folders of the task's inputs, by the input's name.
        workdir: The task's work folder.
    """
    names = {str(folder): name for name, folder in inputs.items()} | {
        f"{workdir}/": "",
        str(workdir): "the work folder",
    }

    def replace_paths(text: str) -> str:
        # The longest first: one folder's path may begin with another's.
        for folder in sorted(names, key=len, reverse=True):
            text = text.replace(folder, names[folder])
        return text

    return replace(
        failure,
        message=replace_paths(failure.message),
        remedy=replace_paths(failure.remedy),
        about={key: replace_paths(value) for key, value in failure.about.items()},
    )


def surroundings(**folders: Path) -> dict[str, int]:
    """Return available and total memory, within this container's limit, and the free disk space at each folder, in bytes.

    Args:
        folders: Folders by name; if one does not exist yet, the nearest folder above it is measured.
    """
    group = ControlGroup().memory()
    total = machine_memory().total_bytes
    resources = {
        "memory_available_bytes": available_memory(group),
        "memory_total_bytes": total if group is None else min(total, group.limit_bytes),
    }
    for name, folder in folders.items():
        try:
            there = next((path for path in (folder, *folder.parents) if path.is_dir()), Path(os.sep))
            resources[f"{name}_free_bytes"] = shutil.disk_usage(there).free
        except OSError:  # removed at the end of the attempt
            continue
    return resources


def with_surroundings(failure: Failure, **folders: Path) -> Failure:
    """Add the machine's free resources to a failure; values that were recorded before stay."""
    now = {f"{PREFIX}{name}": str(value) for name, value in surroundings(**folders).items()}
    return replace(failure, about={**now, **failure.about})


def surroundings_of(about: Mapping[str, str]) -> dict[str, int]:
    """Read the values recorded by :func:`with_surroundings`; empty if there are none."""
    noted = {name.removeprefix(PREFIX): value for name, value in about.items() if name.startswith(PREFIX)}
    return {name: int(value) for name, value in noted.items() if len(value) < 20 and value.isdecimal()}
