"""The compiled kernel for low-rank updates of bfloat16 weights.

If there was no C compiler at installation, or the processor lacks fused multiply-add, numpy does the same in more passes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from slipway.machine.compiled.library import best_kernel
from slipway_merge.tensors.tensor_io import Array

FOLDER = Path(__file__).parent


class Counts(ctypes.Structure):
    """Results of a call: the kernel's ``struct counts``."""

    _fields_ = (("weight_sum", ctypes.c_double), ("changed", ctypes.c_int64), ("finite", ctypes.c_int64))

    weight_sum: float
    changed: int
    finite: int


class Kernel:
    """One of the kernels of the library.

    Args:
        library: The library.
        name: The instructions that it uses.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._panel: int = library.slipway_panel()
        self._merge = library[f"merge_{name}"]
        self._merge.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t] * 3 + [ctypes.POINTER(Counts)]
        self._merge.restype = None

    def panels(self, right: Array) -> Array:
        """Return a right factor (r, columns) in the layout of :meth:`merge`: groups of columns one after the other, padded with zeros."""
        padded = np.pad(right, ((0, 0), (0, -right.shape[1] % self._panel)))
        return np.ascontiguousarray(padded.reshape(len(right), -1, self._panel).transpose(1, 0, 2))

    def merge(self, base: Array, left: Array, panels: Array, *, out: Array) -> Counts:
        """Write ``base + left @ right``, rounded once, to ``out``; other threads can work meanwhile.

        Args:
            base: bfloat16. (rows, columns)
            left: float32. (rows, r)
            panels: The right factor. float32
            out: bfloat16. (rows, columns)
        """
        rows, columns = base.shape
        assert all(array.flags.c_contiguous for array in (base, left, panels, out))
        assert all(array.dtype == np.float32 for array in (left, panels))
        assert (len(left), out.shape) == (rows, base.shape)
        assert panels.shape == (-(-columns // self._panel), left.shape[1], self._panel)
        counts = Counts()
        arrays = (base.ctypes.data, out.ctypes.data, left.ctypes.data, panels.ctypes.data)
        self._merge(*arrays, rows, columns, left.shape[1], counts)
        return counts


@cache
def kernel() -> Kernel | None:
    """Return the kernel for this processor, if there is one."""
    found = best_kernel(FOLDER)
    return Kernel(*found) if found else None
