"""Record the free memory and disk space of a machine at the moment of a failure, because they often explain it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from slipway.errors import Failure
from slipway.machine.cgroup import ControlGroup, available_memory, machine_memory

PREFIX = "machine_"


def surroundings(**folders: Path) -> dict[str, int]:
    """Return available and total memory, within this container's limit, and the free disk space at each folder, in bytes.

    Args:
        folders: Folders by name; if one does not exist yet, the nearest folder above it is measured.
    """
    group = ControlGroup().memory()
    total = machine_memory().total_bytes
    found = {
        "memory_available_bytes": available_memory(group),
        "memory_total_bytes": total if group is None else min(total, group.limit_bytes),
    }
    for name, folder in folders.items():
        try:
            there = next((path for path in (folder, *folder.parents) if path.is_dir()), Path(os.sep))
            found[f"{name}_free_bytes"] = shutil.disk_usage(there).free
        except OSError:  # removed at the end of the attempt
            continue
    return found


def with_surroundings(failure: Failure, **folders: Path) -> Failure:
    """Add the machine's free resources to a failure; values that were recorded before stay."""
    now = {f"{PREFIX}{name}": str(value) for name, value in surroundings(**folders).items()}
    return replace(failure, about={**now, **failure.about})


def surroundings_of(about: Mapping[str, str]) -> dict[str, int]:
    """Read the values recorded by :func:`with_surroundings`; empty if there are none."""
    noted = {name.removeprefix(PREFIX): value for name, value in about.items() if name.startswith(PREFIX)}
    return {name: int(value) for name, value in noted.items() if len(value) < 20 and value.isdecimal()}
