"""Describe the machine on which speeds are measured."""

from __future__ import annotations

import platform

from slipway.machine.cgroup import ControlGroup, machine_memory, usable_cores
from slipway.machine.processor import processor_name
from slipway.validation.speed import Machine


def this_machine() -> Machine:
    """Return what this process may use of the machine."""
    group = ControlGroup()
    limited, memory = group.memory(), machine_memory().total_bytes
    return Machine(
        processor=processor_name() or "unknown CPU",
        cores=usable_cores(group),
        memory_bytes=memory if limited is None else min(memory, limited.limit_bytes),
        platform=f"{platform.system()} {platform.machine()}",
    )
