"""Write the file of a rank: the header, then tensor by tensor, a piece at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipway.model.safetensors_layout import TensorSpec, plan_file
from slipway_tensorrt_llm.weights.planning import Planned, Source
from slipway_tensorrt_llm.weights.values import pieces


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
        on_bytes: Gets the number of bytes of each piece that was written.

    Raises:
        TensorRTLLMExportError: As :func:`slipway_tensorrt_llm.weights.values.pieces`.
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
