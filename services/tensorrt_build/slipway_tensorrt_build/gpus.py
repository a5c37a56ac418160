"""The NVIDIA GPUs of this machine, read through the driver's own library, without CUDA or a subprocess."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``target`` is its architecture, for example ``sm89``."""

    name: str
    target: str


def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that the driver lists, in its order; none if there is no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = (_describe(nvml, index) for index in range(count.value))
        return tuple(gpu for gpu in found if gpu is not None)
    finally:
        nvml.nvmlShutdown()


def _describe(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    device = ctypes.c_void_p()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(96)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return None
    if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) != 0:
        return None
    if nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(len(name))) != 0:
        return None
    return Gpu(name=name.value.decode(errors="replace"), target=f"sm{major.value}{minor.value}")
