"""Name the CPU of this machine."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Return the CPU's name, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
