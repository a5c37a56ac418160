"""Plan where every tensor of a model will lie (shards, offsets, headers) before the first byte is written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipway.model.dtypes import DTYPES
from slipway.model.safetensors_file import INDEX_SUFFIX, METADATA, TensorInfo


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to write. ``dtype`` is its type as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].bits // 8


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file: its header bytes, and its tensors in the order of their offsets from the file's beginning."""

    filename: str
    header: bytes
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def write(self, path: Path, values: Callable[[TensorInfo], Iterable[memoryview]]) -> Iterator[memoryview]:
        """Write the file in order; yield each piece that was written, the header first.

        Args:
            path: The file, which must not exist.
            values: Returns the values of a tensor, in pieces of bytes.

        Raises:
            OSError: For example ENOSPC, before the first value is computed.
        """
        with path.open("xb") as stream:
            os.posix_fallocate(stream.fileno(), 0, self.nbytes)
            stream.write(self.header)
            yield memoryview(self.header)
            for tensor in self.tensors:
                for piece in values(tensor):
                    stream.write(piece)
                    yield piece
                assert stream.tell() == tensor.end, f"{tensor.name}: up to {stream.tell()}, planned {tensor.end}"


def plan_files(groups: Iterable[Sequence[TensorSpec]], *, max_shard_bytes: int) -> list[PlannedFile]:
    """Plan one ``model.safetensors``, or shards of at most ``max_shard_bytes`` of data (a larger group gets its own shard).

    Use as few shards as possible, of about the same size, so that writing or reading several at once ends at the same time.

    Args:
        groups: Tensors to write; those of a group stay in one file. The order is kept, except that wider types come first.
        max_shard_bytes: Limit per file.
    """
    sized = [(sum(tensor.nbytes for tensor in group), group) for group in groups]
    shards = _fill_shards(sized, max_shard_bytes)
    count = len(shards)
    if count == 1:
        return [plan_file("model.safetensors", shards[0])]
    low, high = sum(size for size, _ in sized) // count, max_shard_bytes
    while high - low > max(high // 100, 1):
        middle = (low + high) // 2
        smaller = _fill_shards(sized, middle)
        if len(smaller) == count:
            shards, high = smaller, middle
        else:
            low = middle
    return [
        plan_file(f"model-{number:05d}-of-{count:05d}.safetensors", shard)
        for number, shard in enumerate(shards, start=1)
    ]


def _fill_shards(sized: Iterable[tuple[int, Sequence[TensorSpec]]], limit: int) -> list[list[TensorSpec]]:
    """Distribute groups over files, each filled up to the limit."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for size, group in sized:
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1] += group
        filled += size
    return shards


def index_file(weight_map: Mapping[str, str], *, total_bytes: int, least: int = 2) -> tuple[str, str] | None:
    """Return name and text of the index of several files; None for fewer.

    Args:
        weight_map: Name of the file that holds each tensor.
        total_bytes: Bytes of tensor data in all files.
        least: Number of files from which on there is an index.
    """
    if len(set(weight_map.values())) < least:
        return None
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return f"model{INDEX_SUFFIX}", json.dumps(index, indent=2) + "\n"


def plan_file(
    filename: str, tensors: Sequence[TensorSpec], *, metadata: Mapping[str, str] | None = None
) -> PlannedFile:
    """Plan one file; ``metadata`` is added to its header."""
    # Wider types first, as the reference implementation does: every tensor is then aligned to its type.
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].bits)
    header: dict[str, object] = {METADATA: {"format": "pt", **(metadata or {})}}
    ends = [0]
    for tensor in ordered:
        ends.append(ends[-1] + tensor.nbytes)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": ends[-2:]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    places = [
        TensorInfo(tensor.name, tensor.dtype, tensor.shape, Path(filename), len(prefix) + start, len(prefix) + end)
        for tensor, start, end in zip(ordered, ends, ends[1:], strict=False)
    ]
    return PlannedFile(filename, prefix, tuple(places))
