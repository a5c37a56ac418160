"""The first NVIDIA GPU that this process may use, as its driver says; no library is loaded for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

_QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits")
_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its name, architecture (such as ``sm89``) and memory."""

    name: str
    architecture: str
    memory_bytes: int


def first_gpu() -> Gpu | None:
    """The first GPU; None without one, or with a driver that cannot be asked, which runs nothing either.

    Where ``CUDA_VISIBLE_DEVICES`` names GPUs, it is the first of them. Numbers there count as the driver's when
    ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``, which matters on machines with GPUs of several kinds.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which(_QUERY[0]) is None or visible in {"", "-1", "NoDevFiles"}:
        return None
    which = () if visible is None else (f"--id={visible.split(',')[0].strip()}",)
    try:
        answer = subprocess.run([*_QUERY, *which], capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
        name, capability, mebibytes = (part.strip() for part in answer.splitlines()[0].rsplit(",", 2))
        return Gpu(name, f"sm{capability.replace('.', '')}", int(float(mebibytes)) << 20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
