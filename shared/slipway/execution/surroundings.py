"""What a machine had left when something failed there: the first question about many failures, and gone a moment later."""

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
    """Return memory that is available and there is in all, within this container's limit, and free disk at each folder, in bytes.

    Args:
        folders: Folders by name; one that is not there yet stands for the one it would be in.
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
        except OSError:  # gone with the attempt
            continue
    return found


def with_surroundings(failure: Failure, **folders: Path) -> Failure:
    """Add what the machine has left to a failure; what was noted closer to it stays."""
    now = {f"{PREFIX}{name}": str(value) for name, value in surroundings(**folders).items()}
    return replace(failure, about={**now, **failure.about})


def surroundings_of(about: Mapping[str, str]) -> dict[str, int]:
    """Read what :func:`with_surroundings` noted; empty when nothing was."""
    noted = {name.removeprefix(PREFIX): value for name, value in about.items() if name.startswith(PREFIX)}
    return {name: int(value) for name, value in noted.items() if len(value) < 20 and value.isdecimal()}
