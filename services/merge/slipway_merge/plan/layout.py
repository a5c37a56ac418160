"""Plan the place and content of every output tensor before the first byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slipway.model.dtypes import FLOATS
from slipway.model.safetensors_layout import PlannedFile, TensorSpec, index_file, plan_files
from slipway_merge.tensors.values import Value


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output tensor: its place in its shard (``start`` is an absolute byte offset) and its content."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    value: Value

    @property
    def untouched(self) -> bool:
        """Whether it is a copy of its source's bytes."""
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
        """Number of tensors that are copies of their sources' bytes."""
        return sum(tensor.untouched for tensor in self.tensors)

    @property
    def converted(self) -> int:
        """Number of tensors that only change their data type."""
        return sum(not tensor.untouched and not tensor.value.changed for tensor in self.tensors)

    def pieces(self) -> list[tuple[OutputTensor, ...]]:
        """Return the tensors in order; untouched ones that are also adjacent in their source form one piece."""
        pieces: list[tuple[OutputTensor, ...]] = []
        for tensor in self.tensors:
            last = pieces[-1][-1] if pieces else None
            if last is not None and last.untouched and tensor.untouched and _are_adjacent(last.value, tensor.value):
                pieces[-1] += (tensor,)
            else:
                pieces.append((tensor,))
        return pieces


@dataclass(frozen=True, slots=True)
class Layout:
    """All output files."""

    shards: tuple[Shard, ...]

    def tensors(self) -> Iterator[OutputTensor]:
        """Yield the tensors of all files."""
        return (tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def index(self) -> tuple[str, str] | None:
        """Return name and text of the index; None for a single shard."""
        weight_map = {tensor.name: shard.filename for shard in self.shards for tensor in shard.tensors}
        return index_file(weight_map, total_bytes=self.data_bytes)


def _are_adjacent(first: Value, second: Value) -> bool:
    return first.source.file == second.source.file and first.source.end == second.source.start


def plan_layout(values: Mapping[str, Value], *, dtype: str | None, max_shard_bytes: int) -> Layout:
    """Plan shards of at most ``max_shard_bytes`` of data each; a larger tensor gets its own shard.

    Args:
        values: Contents by name; the order is kept.
        dtype: Safetensors name of the type that floating-point tensors are written in; None keeps each tensor's.
        max_shard_bytes: Limit per file.
    """
    groups = []
    for name, value in values.items():
        # Integers and masks are kept as they are.
        out = dtype if dtype and value.source.dtype in FLOATS else value.source.dtype
        groups.append((TensorSpec(name, out, value.source.shape),))
    return Layout(tuple(_shard(file, values) for file in plan_files(groups, max_shard_bytes=max_shard_bytes)))


def _shard(file: PlannedFile, values: Mapping[str, Value]) -> Shard:
    tensors = [OutputTensor(t.name, t.dtype, t.shape, t.start, t.nbytes, values[t.name]) for t in file.tensors]
    return Shard(file.filename, file.header, tuple(tensors))
