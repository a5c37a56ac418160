"""Where every output tensor will lie: shards, offsets and headers, known before the first byte is written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from slipway.safetensors_file import DTYPE_BITS, INDEX_SUFFIX
from slipway_merge.values import Value

#: Data types that are converted when another one is asked for; everything else (integers, masks) is kept.
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output tensor: its place in its shard (``start`` is an absolute byte offset) and what fills it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    value: Value

    @property
    def untouched(self) -> bool:
        """Whether it is its source's bytes."""
        return not self.value.changed and self.value.source.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its header bytes and its tensors in the order of their offsets."""

    filename: str
    header: bytes
    tensors: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    @property
    def copied(self) -> int:
        """Number of tensors that are their sources' bytes."""
        return sum(tensor.untouched for tensor in self.tensors)

    @property
    def converted(self) -> int:
        """Number of tensors that only change their data type."""
        return sum(not tensor.untouched and not tensor.value.changed for tensor in self.tensors)

    def pieces(self) -> list[tuple[OutputTensor, ...]]:
        """The tensors in their order; untouched ones that follow each other in their source too are one piece."""
        pieces: list[tuple[OutputTensor, ...]] = []
        for tensor in self.tensors:
            last = pieces[-1][-1] if pieces else None
            if last is not None and last.untouched and tensor.untouched and _adjacent(last.value, tensor.value):
                pieces[-1] += (tensor,)
            else:
                pieces.append((tensor,))
        return pieces


@dataclass(frozen=True, slots=True)
class Layout:
    """All output files."""

    shards: tuple[Shard, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(tensor.nbytes for shard in self.shards for tensor in shard.tensors)

    def index(self) -> tuple[str, str] | None:
        """Name and text of the index, for several shards."""
        if len(self.shards) == 1:
            return None
        weight_map = {tensor.name: shard.filename for shard in self.shards for tensor in shard.tensors}
        index = {"metadata": {"total_size": self.data_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        return f"model{INDEX_SUFFIX}", json.dumps(index, indent=2) + "\n"


def _adjacent(first: Value, second: Value) -> bool:
    return first.source.file == second.source.file and first.source.end == second.source.start


def plan_layout(values: Mapping[str, Value], *, dtype: str | None, max_shard_bytes: int) -> Layout:
    """Shards of at most ``max_shard_bytes`` of data each (a tensor larger than that has one of its own).

    Args:
        values: What to write, by name; the order is kept.
        dtype: Safetensors name of the type that floating-point tensors are written in; None keeps each tensor's.
        max_shard_bytes: Limit per file.
    """
    groups: list[list[tuple[str, str, int]]] = [[]]
    filled = 0
    for name, value in values.items():
        out = dtype if dtype and value.source.dtype in FLOATS else value.source.dtype
        nbytes = math.prod(value.source.shape) * DTYPE_BITS[out] // 8
        if groups[-1] and filled + nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, out, nbytes))
        filled += nbytes
    count = len(groups)
    names = [
        f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        for number in range(count)
    ]
    return Layout(tuple(_shard(name, group, values) for name, group in zip(names, groups, strict=True)))


def _shard(filename: str, group: list[tuple[str, str, int]], values: Mapping[str, Value]) -> Shard:
    # Wider types first, as the reference implementation does: every tensor is then aligned to its type.
    group = sorted(group, key=lambda entry: -DTYPE_BITS[entry[1]])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, nbytes in group:
        shape = list(values[name].source.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    tensors, start = [], len(prefix)
    for name, dtype, nbytes in group:
        tensors.append(OutputTensor(name, dtype, values[name].source.shape, start, nbytes, values[name]))
        start += nbytes
    return Shard(filename, prefix, tuple(tensors))
