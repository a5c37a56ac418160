"""Write the file of a rank: the header, then each tensor piece by piece, converted to the checkpoint's type."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.errors import TensorRTLLMExportError
from slipway.model.dtypes import numpy_dtypes
from slipway.model.safetensors_layout import TensorSpec, plan_file
from slipway.model.weights.reading import mapped
from slipway_tensorrt_llm.weights.planning import Part, Planned, Source

PIECE = 1 << 20
"""Number of weights to convert at once: 4 MiB in float32."""
Array = NDArray[Any]
_EXPONENTS = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}
"""Bits that are all set in NaN and infinity."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written: its path, its SHA-256 in hexadecimal, its size in bytes, and the number of its tensors."""

    path: Path
    sha256: str
    size: int
    tensors: int


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank{rank}.safetensors"


def file_bytes(planned: Sequence[Planned], dtype: str) -> int:
    """Return the number of bytes of a rank's weights."""
    return sum(spec.nbytes for spec in _specs(planned, dtype))


def write_rank(
    path: Path,
    planned: Sequence[Planned],
    sources: Mapping[str, Source],
    *,
    dtype: str,
    on_bytes: Callable[[int], None],
) -> Written:
    """Write a file.

    Args:
        path: The file, which must not exist.
        planned: Its tensors.
        sources: The model's tensors by name.
        dtype: The type of all, as safetensors names it.
        on_bytes: Called with the number of bytes of each written piece.

    Raises:
        TensorRTLLMExportError: As :func:`slipway_tensorrt_llm.weights.writing.pieces`.
        OSError: For example ENOSPC.
    """
    file, by_name = plan_file(path.name, _specs(planned, dtype)), {each.name: each for each in planned}
    digest = hashlib.sha256()
    for number, piece in enumerate(file.write(path, lambda tensor: _values(by_name[tensor.name], sources, dtype))):
        digest.update(piece)
        if number:  # the first is the header
            on_bytes(len(piece))
    return Written(path, digest.hexdigest(), file.nbytes, len(file.tensors))


def _specs(planned: Sequence[Planned], dtype: str) -> list[TensorSpec]:
    return [TensorSpec(each.name, dtype, each.shape) for each in planned]


def _values(planned: Planned, sources: Mapping[str, Source], dtype: str) -> Iterator[memoryview]:
    for part in planned.parts:
        for values in pieces(part, sources[part.source], dtype=dtype, offset=planned.offset):
            yield values.reshape(-1).view(np.uint8).data
    if planned.padding:
        yield memoryview(bytes(planned.padding * planned.shape[1] * (4 if dtype == "F32" else 2)))


def pieces(part: Part, source: Source, *, dtype: str, offset: float, most: int = PIECE) -> Iterator[Array]:
    """Yield the values of a part in a type, as blocks of at least one row and otherwise at most ``most`` values.

    Args:
        part: The part.
        source: The tensor that it belongs to.
        dtype: The type, as safetensors names it.
        offset: Number to add to each value.
        most: Most values of a piece.

    Raises:
        TensorRTLLMExportError: ``NON_FINITE_WEIGHTS``, or ``WEIGHT_OVERFLOW`` for a value that the type cannot hold.
    """
    whole = mapped(source.info)
    whole = whole.T if source.transposed else whole
    first, last = part.rows
    columns = slice(*part.columns) if part.columns else None
    width = part.columns[1] - part.columns[0] if part.columns else 1
    step = max(1, most // max(1, width))
    for start in range(first, last, step):
        rows = slice(start, min(start + step, last))
        block = whole[rows] if columns is None else whole[rows, columns]
        yield _convert(np.ascontiguousarray(block), source.info.name, source.info.dtype, dtype, offset)


def _convert(block: Array, name: str, stored: str, dtype: str, offset: float) -> Array:
    target = numpy_dtypes(dtype)[dtype]
    if offset:
        with np.errstate(over="ignore", invalid="ignore"):
            values = (block.astype(np.float32) + np.float32(offset)).astype(target)
    elif stored == dtype:
        values = block
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # both are refused below
            values = block.astype(target)
    if is_finite(values, dtype):
        return values
    if not np.isfinite(block.astype(np.float64)).all():
        raise TensorRTLLMExportError(
            f"weight {name!r} contains NaN or infinity",
            reason="NON_FINITE_WEIGHTS",
            remedy="check the checkpoint: training may have diverged",
            about={"tensor": name},
        )
    raise TensorRTLLMExportError(
        f"weight {name!r} has values beyond what {target.name} can hold",
        reason="WEIGHT_OVERFLOW",
        remedy="use dtype bfloat16",
        about={"tensor": name, "dtype": target.name},
    )


def is_finite(values: Array, dtype: str) -> bool:
    """Return whether no value is NaN or infinite. Check the bits, so that no copy in another type is needed."""
    kind, exponent = _EXPONENTS[dtype]
    bits = values.view(kind) & kind(exponent)
    return not bool((bits == kind(exponent)).any())
