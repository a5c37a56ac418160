"""Write the file of a rank: the header, then tensor by tensor, a piece at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipway.model.safetensors_layout import TensorSpec, plan_file
from slipway_tensorrt_llm.weights.planning import Planned, Source
from slipway_tensorrt_llm.weights.values import Array, pieces


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
    digest = hashlib.sha256(file.header)
    with path.open("xb") as stream:
        stream.write(file.header)
        for tensor in file.tensors:
            for values in _values(by_name[tensor.name], sources, dtype):
                data = values.reshape(-1).view(np.uint8).data
                digest.update(data)
                on_bytes(stream.write(data))
    return Written(path, digest.hexdigest(), file.nbytes, len(file.tensors))


def _specs(planned: Sequence[Planned], dtype: str) -> list[TensorSpec]:
    return [TensorSpec(each.name, dtype, each.shape) for each in planned]


def _values(planned: Planned, sources: Mapping[str, Source], dtype: str) -> Iterator[Array]:
    for part in planned.parts:
        yield from pieces(part, sources[part.source], dtype=dtype, offset=planned.offset)
    if planned.padding:
        yield np.zeros((planned.padding * planned.shape[1] * (4 if dtype == "F32" else 2),), np.uint8)
