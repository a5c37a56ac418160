"""The output tensors of a merge, planned before the first byte is written: their sources, changes and places.

The source is stored bytes or a computed weight, the change an update that is added, the place an offset in an output file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from slipway.model.dtypes import FLOATS
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import PlannedFile, TensorSpec, index_file, plan_files


@dataclass(frozen=True, slots=True)
class Factor:
    """One matrix of a low-rank product, possibly to be transposed first."""

    info: TensorInfo
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Shape in the product."""
        first, second = self.info.shape
        return (second, first) if self.transposed else (first, second)


@dataclass(frozen=True, slots=True)
class Update:
    """``scaling · left @ right``, added to a weight of the same shape. left: (rows, r), right: (r, columns)."""

    module: str
    left: Factor
    right: Factor
    rank: int
    scaling: float

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the product."""
        return (self.left.shape[0], self.right.shape[1])


@dataclass(frozen=True, slots=True)
class Computed:
    """A weight that is computed by other means than a sum by rows; one output tensor at a time.

    Attributes:
        module: The adapter's module.
        form: The form that computes it, for the report: ``dora``, ``loha`` …
        compute: Returns all values in the shape of the output tensor, computed in the given type (float32 or float64).
        error: Returns the written tensor's error against an independent computation, in units of rounding; None if there is no
            independent computation.
        part: As ``compute``, for some of the first dimension, such as a few experts of a stack; None if only all can be computed.
        tensors: The adapter's tensors that it is computed from.
    """

    module: str
    form: str
    compute: Callable[[np.dtype[np.floating]], np.ndarray]
    error: Callable[[TensorInfo], float] | None = None
    part: Callable[[np.dtype[np.floating], slice], np.ndarray] | None = None
    tensors: tuple[TensorInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """Content of an output tensor: stored bytes (of the base, or of the adapter for a replaced tensor), with an update added or
    replaced by computed values.
    """

    source: TensorInfo
    update: Update | None = None
    computed: Computed | None = None

    @property
    def changed(self) -> bool:
        """Whether it is more than stored bytes."""
        return self.update is not None or self.computed is not None


#: Returns a weight's value after the adapter's change, given its present tensor.
Alteration = Callable[[TensorInfo], Value]


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Output tensors by name, in the base's order, and the resulting changes of the configuration.

    Attributes:
        values: Content of every output tensor.
        untied: Tied weights became different, so ``tie_word_embeddings`` must be false.
        vocab_size: New number of embedding rows if the vocabulary was resized.
        replaced: Names of the output tensors taken whole from the adapter.
        warnings: Warnings for the user.
        layers: For each layer of a deepened model, the base layer that it copies; empty for any other.
    """

    values: Mapping[str, Value]
    untied: bool = False
    vocab_size: int | None = None
    replaced: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()


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
    """All output files, or with ``partial`` some of them, whose index is never left out."""

    shards: tuple[Shard, ...]
    partial: bool = False

    def tensors(self) -> Iterator[OutputTensor]:
        """Yield the tensors of all files."""
        return (tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def index(self) -> tuple[str, str] | None:
        """Return name and text of the index; None for a model of a single shard."""
        weight_map = {tensor.name: shard.filename for shard in self.shards for tensor in shard.tensors}
        return index_file(weight_map, total_bytes=self.data_bytes, least=1 if self.partial else 2)


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
