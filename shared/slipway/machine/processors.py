"""The processors of this machine: the name of its CPU, and its NVIDIA GPUs, as the driver's program describes them.

The program runs in a process of its own, which can be ended where a driver hangs.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

_PROGRAM = "nvidia-smi"
_QUERY = ("--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits")
_LIST = ("--list-gpus",)
_GPU = re.compile(r"GPU (\d+): ")
_SLICE = re.compile(r"\s+MIG (?P<profile>(?:\d+c\.)?\d+g\.(?P<gigabytes>\d+)gb\S*)\s.*\(UUID: (?P<id>MIG-[^)]+)\)")
_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a slice of one (MIG): its name, architecture (such as ``sm89``) and memory; 0 if the driver does not say how much."""

    name: str
    architecture: str
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Slice:
    """A MIG slice that this process may use, and the number of its GPU."""

    gpu: str
    profile: str
    memory_bytes: int
    id: str


def first_gpu() -> Gpu | None:
    """Return the first GPU; None without one, or if its driver does not respond.

    If ``CUDA_VISIBLE_DEVICES`` names GPUs, return the first of them. Its numbers are the driver's if ``CUDA_DEVICE_ORDER`` is
    ``PCI_BUS_ID``, which matters on machines with several kinds of GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in {"", "-1", "NoDevFiles"}:
        return None
    wanted = "" if visible is None else visible.split(",")[0].strip()
    try:
        mig = _slice(wanted)
        which = mig.gpu if mig is not None else wanted
        name, capability, total = _ask(*_QUERY, *((f"--id={which}",) if which else ())).splitlines()[0].rsplit(",", 2)
        # For a sliced GPU, the driver gives the whole GPU's memory, or none.
        memory_bytes = int(float(total)) << 20 if mig is None else mig.memory_bytes
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    shown = name.strip() if mig is None else f"{name.strip()} MIG {mig.profile}"
    return Gpu(shown, _architecture(capability), memory_bytes)


def usable_gpus() -> int:
    """Return the number of GPUs that this process may use; a slice of one counts as one, and a process has one slice. 0 as :func:`first_gpu`."""
    if first_gpu() is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if _slice("" if visible is None else visible.split(",")[0].strip()) is not None:
            return 1
        gpus = [gpu[1] for line in _ask(*_LIST).splitlines() if (gpu := _GPU.match(line))]
    except (OSError, subprocess.SubprocessError, IndexError):
        return 1
    if visible is None:
        return max(1, len(gpus))
    named = list(dict.fromkeys(name.strip() for name in visible.split(",")))
    # CUDA ignores what follows the first name that is none.
    usable = takewhile(lambda name: name in gpus or name.startswith("GPU-"), named)
    return max(1, sum(1 for _ in usable))


def all_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that the driver lists, in its order; none without a driver, or if it does not respond."""
    try:
        rows = [row.rsplit(",", 2) for row in _ask(*_QUERY).splitlines()]
        return tuple(
            Gpu(name.strip(), _architecture(capability), int(total) << 20 if total.strip().isdecimal() else 0)
            for name, capability, total in rows
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def _architecture(capability: str) -> str:
    """Return the architecture with a compute capability such as ``8.9``."""
    return f"sm{capability.strip().replace('.', '')}"


def _slice(wanted: str) -> _Slice | None:
    """Return the slice that CUDA will use: the wanted one, or the first of the wanted GPU, or of the first GPU."""
    slices: list[_Slice] = []
    gpus: list[str] = []
    for line in _ask(*_LIST).splitlines():
        if gpu := _GPU.match(line):
            gpus.append(gpu[1])
        elif gpus and (part := _SLICE.match(line)):
            size = int(part["gigabytes"]) * 10**9  # by its name, a little less than it really has
            slices.append(_Slice(gpus[-1], part["profile"], size, part["id"]))
    if wanted.startswith("MIG-"):
        return [one for one in slices if one.id.startswith(wanted)][0]  # noqa: RUF015 - a missing one must raise IndexError
    usual = wanted or (gpus[0] if gpus else "")
    return next((one for one in slices if one.gpu == usual), None)


def _ask(*arguments: str) -> str:
    """Ask the driver's program; not one in the current folder, which may be a checkpoint with code.

    Raises:
        OSError: There is none.
        subprocess.SubprocessError: It does not answer, or refuses.
    """
    folders = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if Path(part).is_absolute()]
    program = shutil.which(_PROGRAM, path=os.pathsep.join(folders))
    if program is None:
        raise FileNotFoundError(_PROGRAM)
    return subprocess.run((program, *arguments), capture_output=True, text=True, timeout=_SECONDS, check=True).stdout


def processor_name() -> str:
    """Return the CPU's name, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
