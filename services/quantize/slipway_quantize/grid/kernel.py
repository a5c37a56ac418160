"""The compiled kernel that rounds groups of weights; without it, numpy does the same in more passes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.machine.compiled.library import best_kernel

FOLDER = Path(__file__).parent
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The kernel's ``enum type``, by numpy's names."""
MOST = 256
"""Most weights of a group."""


class _Task(ctypes.Structure):
    """The kernel's ``struct task``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "packed", "steps")),
        *((name, ctypes.c_int64) for name in ("count", "rows", "groups", "size", "bits", "leading")),
        *((name, ctypes.c_int64) for name in ("weight_type", "scale_type")),
    )


class Sums(ctypes.Structure):
    """Results of a call: the kernel's ``struct sums``."""

    _fields_ = (
        ("error", ctypes.c_double),
        ("energy", ctypes.c_double),
        ("finite", ctypes.c_int64),
        ("fits", ctypes.c_int64),
    )

    error: float
    energy: float
    finite: int
    fits: int


class Kernel:
    """One of the kernels of the library.

    Args:
        library: The library.
        name: The instructions that it uses.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._quantize = library[f"quantize_{name}"]
        self._quantize.argtypes = [ctypes.POINTER(_Task), ctypes.POINTER(Sums)]
        self._quantize.restype = None

    def quantize(
        self, weight: NDArray[Any], steps: NDArray[np.float32], *, bits: int, packed: NDArray[Any], scales: NDArray[Any]
    ) -> Sums:
        """Fill ``packed`` and ``scales`` as :func:`slipway_quantize.grid.search.quantize_groups` does; other threads can work meanwhile.

        Args:
            weight: float32, float16 or bfloat16, with contiguous rows or contiguous columns. (N, K)
            steps: Tried steps.
            bits: 3, 4 or 8.
            packed: uint8. (N, K · bits / 8)
            scales: float32, float16 or bfloat16. (N, G)
        """
        rows, columns = weight.shape
        groups = scales.shape[1]
        size = columns // groups
        leading = 0 if weight.flags.c_contiguous else weight.strides[1] // weight.itemsize
        assert leading == 0 or weight.strides[0] == weight.itemsize
        assert packed.dtype == np.uint8
        assert packed.shape == (rows, columns * bits // 8)
        assert len(scales) == rows
        assert columns == size * groups
        assert size in {16, 32, 64, 128, MOST}
        assert packed.flags.c_contiguous
        assert scales.flags.c_contiguous
        sums = Sums()
        task = _Task(
            *(array.ctypes.data for array in (weight, scales, packed, steps)),
            *(len(steps), rows, groups, size, bits, leading),
            *(TYPES[array.dtype.name] for array in (weight, scales)),
        )
        self._quantize(task, sums)
        return sums


@cache
def kernel() -> Kernel | None:
    """Return the kernel for this processor, if there is one."""
    found = best_kernel(FOLDER)
    return Kernel(*found) if found else None
