"""Call ggml's own code, which the wheel of xllamacpp exports: quantize rows of weights, and read a file's index."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from slipway.distribution import install_command
from slipway.errors import GGUFExportError

_DIMENSIONS = 4
"""Number of sizes that ggml stores for each tensor."""


class _Init(ctypes.Structure):
    """``struct gguf_init_params``."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as ggml finds it in a file. ``shape`` has the axis with the largest stride first, as in numpy."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    offset: int


def unavailable_error(why: str) -> GGUFExportError:
    """Return the error for a machine without a usable ggml."""
    return GGUFExportError(
        f"ggml's code for GGUF files cannot be used: {why}",
        reason="UNSUPPORTED",
        remedy=f"{install_command('gguf')}; xllamacpp has wheels for Linux, macOS and Windows",
    )


@cache
def library() -> ctypes.CDLL:
    """Return the library with ggml's functions.

    Raises:
        GGUFExportError: ``UNSUPPORTED``.
    """
    spec = find_spec("xllamacpp")
    if spec is None:
        raise unavailable_error("xllamacpp is not installed")
    places = list(spec.submodule_search_locations or ())
    files = sorted(path for place in places for path in Path(place).glob("xllamacpp*.so"))
    if not files:
        raise unavailable_error(
            f"xllamacpp is installed without its library, xllamacpp*.so in {', '.join(places) or 'no folder'}"
        )
    try:
        loaded = ctypes.CDLL(str(files[0]))
        return _declare(loaded)
    except (OSError, AttributeError) as error:
        raise unavailable_error(str(error)) from error


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    functions: dict[str, tuple[Any, list[Any]]] = {
        "ggml_quantize_chunk": (ctypes.c_size_t, [ctypes.c_int, pointer, pointer, number, number, number, pointer]),
        "gguf_init_from_file": (pointer, [text, _Init]),
        "gguf_free": (None, [pointer]),
        "gguf_get_n_tensors": (number, [pointer]),
        "gguf_get_tensor_name": (text, [pointer, number]),
        "gguf_get_tensor_type": (ctypes.c_int, [pointer, number]),
        "gguf_get_tensor_offset": (ctypes.c_size_t, [pointer, number]),
        "gguf_get_tensor_ne": (ctypes.POINTER(number * _DIMENSIONS), [pointer, number]),
        "gguf_get_data_offset": (ctypes.c_size_t, [pointer]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def row_bytes(kind: Kind, columns: int) -> int:
    """Return the bytes of a row."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return columns // block * size


def quantize(values: NDArray[np.float32], kind: Kind, importance: NDArray[np.float32] | None = None) -> memoryview:
    """Convert rows to a type of ggml; other threads can run meanwhile.

    Args:
        values: The rows, contiguous. (rows, columns)
        kind: The type; its blocks divide the columns.
        importance: Importance of each column, for types that weight the error of rounding with it. (columns,)
    """
    rows, columns = values.shape
    target = np.empty(rows * row_bytes(kind, columns), np.uint8)
    weight = None if importance is None else importance.ctypes.data
    written = library().ggml_quantize_chunk(kind, values.ctypes.data, target.ctypes.data, 0, rows, columns, weight)
    if written != target.nbytes:
        raise GGUFExportError(
            f"ggml wrote {written} bytes for {rows} rows of {columns} weights in {kind.name}, and not {target.nbytes}",
            remedy="install the version of xllamacpp that constraints.txt names",
        )
    return target.data


def stored_tensors(path: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors that ggml finds in a file, as llama.cpp does; offsets count from the file's beginning.

    Raises:
        GGUFExportError: ggml cannot read the file.
    """
    ggml = library()
    context = ggml.gguf_init_from_file(str(path).encode(), _Init(no_alloc=True, ctx=None))
    if not context:
        raise GGUFExportError(f"ggml cannot read {path.name}, which was just written", about={"file": path.name})
    try:
        start = ggml.gguf_get_data_offset(context)
        tensors = []
        for index in range(ggml.gguf_get_n_tensors(context)):
            sizes = list(ggml.gguf_get_tensor_ne(context, index).contents)
            while len(sizes) > 1 and sizes[-1] == 1:
                sizes.pop()
            name = ggml.gguf_get_tensor_name(context, index).decode()
            kind = Kind(ggml.gguf_get_tensor_type(context, index))
            offset = start + ggml.gguf_get_tensor_offset(context, index)
            tensors.append(StoredTensor(name, kind, tuple(reversed(sizes)), offset))
        return tuple(tensors)
    finally:
        ggml.gguf_free(context)
