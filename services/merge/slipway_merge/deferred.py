"""Describe a planned merge instead of writing its weights, and compute the weights of such a description when they are read.

The arithmetic is that of the written merge, in the same blocks of rows, so the weights have the same bits. Reading rows of a weight's
sample also checks them, as the written file would have been checked (``verify/spot_check.py``).
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipway.files.json_documents import LARGEST_LIST
from slipway.files.paths import file_in
from slipway.files.regular_file import read_regular
from slipway.model.dtypes import DTYPES
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.reading import DEFERRED, description_error, mapped
from slipway_merge.tensors.deltas import Change, LowRank, compute_type, merge_block, round_block
from slipway_merge.tensors.kernel import Block, kernel
from slipway_merge.tensors.outputs import Factor, Layout, OutputTensor, Update, Value
from slipway_merge.tensors.tensor_io import FLOAT_TYPES, Array, TensorReader
from slipway_merge.verify.spot_check import UpdateSample
from slipway_merge.writing.portions import BLOCK_ELEMENTS, matrix_shape, read_rows

_SAMPLE_BYTES = 64
_RECENT = 4
"""Number of updates to keep in memory: readers take weights one after another, with a few threads."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class _Place(_Part):
    """Where a stored tensor lies."""

    input: Literal["base", "adapter"]
    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = Field(ge=0)


class _Factor(_Part):
    place: _Place
    transposed: bool


class _Update(_Part):
    module: str
    left: _Factor
    right: _Factor
    rank: int
    scaling: float = Field(allow_inf_nan=False)


class _Tensor(_Part):
    """An output tensor: the file that would hold it, its place in that file, and its source and update."""

    name: str
    dtype: str
    file: str
    start: int = Field(ge=0)
    source: _Place
    update: _Update | None


class _Recipe(_Part):
    """The description.

    Attributes:
        stage: The stage whose reader computes the weights.
        version: Increased whenever the same description gives other weights, so that results computed from it get other action keys.
        fingerprint: Digest of some bytes of every tensor that it names.
        tensors: Every output tensor, file by file.
    """

    stage: Literal["merge"]
    version: Literal[1]
    fingerprint: str
    tensors: tuple[_Tensor, ...]

    def places(self) -> Iterator[_Place]:
        """Yield the place of every stored tensor, in order."""
        for tensor in self.tensors:
            yield tensor.source
            if tensor.update is not None:
                yield from (tensor.update.left.place, tensor.update.right.place)


def reason_to_write(layout: Layout) -> str:
    """Return why the weights of a merge must be written; an empty text if they need not be."""
    forms = sorted({tensor.value.computed.form for tensor in layout.tensors() if tensor.value.computed is not None})
    return f"weights of the form {forms[0]} are computed by peft, one module at a time" if forms else ""


def describe_weights(folder: Path, layout: Layout, inputs: Mapping[str, Path]) -> None:
    """Write the description of a merge into its output folder.

    Args:
        folder: The folder.
        layout: The planned merge.
        inputs: The folders ``base`` and ``adapter``.
    """
    owners = {path: name for name, path in inputs.items()}
    tensors = tuple(
        _Tensor(
            name=tensor.name,
            dtype=tensor.dtype,
            file=shard.filename,
            start=tensor.start,
            source=_place(tensor.value.source, owners),
            update=_describe_update(tensor.value.update, owners),
        )
        for shard in layout.shards
        for tensor in shard.tensors
    )
    recipe, stored = _Recipe(stage="merge", version=1, fingerprint="", tensors=tensors), _Stored(inputs)
    fingerprint = _fingerprint(stored.find(place) for place in recipe.places())
    text = recipe.model_copy(update={"fingerprint": fingerprint}).model_dump_json()
    (folder / DEFERRED).write_text(text + "\n", encoding="utf-8")


def _place(info: TensorInfo, owners: Mapping[Path, str]) -> _Place:
    owner = owners[info.file.parent]
    return _Place.model_validate(
        {
            "input": owner,
            "file": info.file.name,
            "name": info.name,
            "dtype": info.dtype,
            "shape": info.shape,
            "start": info.start,
        }
    )


def _describe_update(update: Update | None, owners: Mapping[Path, str]) -> _Update | None:
    if update is None:
        return None
    left, right = (
        _Factor(place=_place(factor.info, owners), transposed=factor.transposed)
        for factor in (update.left, update.right)
    )
    return _Update(module=update.module, left=left, right=right, rank=update.rank, scaling=update.scaling)


def _fingerprint(places: Iterable[TensorInfo]) -> str:
    """Return a digest of the tensors' places and of some bytes of each, so that other weights of the same shapes are noticed."""
    sha = hashlib.sha256()
    with TensorReader() as reader:
        for info in places:
            sha.update(repr((info.file.name, info.name, info.dtype, info.shape, info.start)).encode())
            buffer = np.empty(min(_SAMPLE_BYTES, info.nbytes), np.uint8)
            for offset in (0, (info.nbytes - buffer.nbytes) // 2):
                reader.fill(buffer, info, offset)
                sha.update(buffer.data)
    return sha.hexdigest()


class MergedWeights:
    """Compute the weights of a described merge when they are read; a :class:`slipway.model.weights.reading.Weights`.

    Args:
        folder: The merge's output.
        inputs: The folders ``base`` and ``adapter`` of the merge; other inputs are ignored.

    Attributes:
        worst: Largest error of the samples read so far, as a share of what rounding explains.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` if the description does not fit base and adapter.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Path]) -> None:
        recipe = _read(folder)
        if len({tensor.name for tensor in recipe.tensors}) < len(recipe.tensors):
            raise description_error("it names a tensor twice")
        stored = _Stored(inputs)
        self._planned = {tensor.name: _plan_tensor(tensor, stored) for tensor in recipe.tensors}
        if _fingerprint(stored.find(place) for place in recipe.places()) != recipe.fingerprint:
            raise description_error("base or adapter is not the one that was merged")
        self.tensors: Mapping[str, TensorInfo] = {
            one.name: TensorInfo(
                one.name, one.dtype, tensor.shape, Path(one.file), one.start, one.start + tensor.nbytes
            )
            for one, tensor in zip(recipe.tensors, self._planned.values(), strict=True)
        }
        self.worst = 0.0
        self._reader = TensorReader()
        self._memory = threading.local()
        self._updates: OrderedDict[str, tuple[LowRank, UpdateSample]] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all files."""
        self._reader.__exit__(None, None, None)

    def rows(self, name: str, first: int, count: int) -> Array:
        """As :meth:`slipway.model.weights.reading.Weights.rows`; rows of the sample are checked.

        Raises:
            ModelMergeError: ``NON_FINITE_WEIGHTS``, ``DTYPE_UNSUPPORTED`` or ``MERGE_NOT_VERIFIED``.
            CheckpointValidationError: ``SAFETENSORS_CORRUPT`` if an input became shorter.
        """
        tensor = self._planned[name]
        if tensor.untouched:
            return mapped(tensor.value.source)[first : first + count]
        rows, columns = matrix_shape(tensor)
        low_rank, sample = self._update(tensor)
        made = np.empty((min(count, rows - first), columns), FLOAT_TYPES[tensor.dtype])
        if not self._merge_in_place(tensor, low_rank, first, made):
            # The merge's own blocks, because numpy's products depend on them.
            step = _block_rows(columns)
            for begin in range(first - first % step, first + len(made), step):
                block = self._block(tensor, begin, min(step, rows - begin), low_rank)
                start, end = max(begin, first), min(begin + len(block), first + len(made))
                made[start - first : end - first] = block[start - begin : end - begin]
        if sample is not None:
            start, end = max(sample.first, first), min(sample.first + sample.count, first + len(made))
            if start < end:
                self.worst = max(self.worst, sample.error(made[start - first : end - first].astype(np.float64), start))
        return made.reshape(len(made), *tensor.shape[1:])

    def check_samples(self, on_tensor: Callable[[int, int], None], *, names: Collection[str]) -> dict[str, Any]:
        """Read the sample of every weight with an update; return figures for the report.

        Args:
            on_tensor: Called with the numbers of checked and of all tensors; an exception from it ends the check.
            names: The weights to check.

        Raises:
            ModelMergeError: As :meth:`rows`.
        """
        checked = 0
        for done, name in enumerate(each for each in self._planned if each in names):
            on_tensor(done, len(names))
            tensor = self._planned[name]
            sample = self._update(tensor)[1]
            if sample is not None:
                self.rows(name, sample.first, sample.count)
                checked += 1
        return {
            "tensors": len(names),
            "modules_computed": checked,
            "largest_error_of_tolerance": round(self.worst, 4),
        }

    def _merge_in_place(self, tensor: OutputTensor, low_rank: LowRank | None, first: int, made: Array) -> bool:
        """Fill rows with the compiled kernel, whose results do not depend on blocks; return False for what numpy must compute or refuse."""
        source, compiled = tensor.value.source, kernel()
        if low_rank is None or compiled is None or not source.dtype == tensor.dtype == "BF16":
            return False
        left, panels = low_rank.factors()[0][first : first + len(made)], low_rank.panels(compiled)
        step, row_bytes = _block_rows(made.shape[1]), made.shape[1] * made.itemsize
        for start in range(0, len(made), step):
            part = made[start : start + step]
            self._reader.fill(part.reshape(-1).view(np.uint8), source, (first + start) * row_bytes)
            if not compiled.merge(part, left[start : start + step], panels, out=part).finite:
                return False
        return True

    def _block(self, tensor: OutputTensor, first: int, count: int, low_rank: LowRank | None) -> Array:
        """Return rows of the result, valid until the thread's next call."""
        memory: Block | None = getattr(self._memory, "block", None)
        if memory is None:
            memory = self._memory.block = Block()
        base, unused = read_rows(tensor, self._reader, first, count, memory), Change("", tensor.name)
        source, output = tensor.value.source.dtype, tensor.dtype
        if low_rank is None:
            return round_block(base, source=source, output=output, block=memory, change=unused, add=None)
        return merge_block(base, low_rank, first_row=first, source=source, output=output, block=memory, change=unused)

    def _update(self, tensor: OutputTensor) -> tuple[LowRank, UpdateSample] | tuple[None, None]:
        """Return the update of a weight and its sample, or two times None; keep those of the last weights."""
        update = tensor.value.update
        if update is None:
            return None, None
        with self._lock:
            if tensor.name not in self._updates:
                wide = compute_type(tensor.dtype, tensor.value.source.dtype)
                self._updates[tensor.name] = LowRank(update, self._reader, wide), UpdateSample(tensor, self._reader)
                if len(self._updates) > _RECENT:
                    self._updates.popitem(last=False)
            return self._updates[tensor.name]


def _block_rows(columns: int) -> int:
    """Return the number of rows that are worked on at once."""
    return max(1, BLOCK_ELEMENTS // max(columns, 1))


def _read(folder: Path) -> _Recipe:
    try:
        return _Recipe.model_validate_json(read_regular(folder / DEFERRED, largest=LARGEST_LIST))
    except (OSError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise description_error(f"it cannot be read ({first})") from error


class _Stored:
    """Finds the stored tensors of a description in the inputs.

    Each file is looked up once: a mixture has tens of thousands of tensors in a few files.

    Args:
        inputs: The folders by name.
    """

    def __init__(self, inputs: Mapping[str, Path]) -> None:
        self._inputs = inputs
        self._files: dict[tuple[str, str], tuple[Path, int]] = {}

    def find(self, place: _Place) -> TensorInfo:
        """Find the stored tensor of a place; check that its bytes are in a file of the input."""
        if place.input not in self._inputs:
            raise description_error(f"the input {place.input} is missing")
        if place.dtype not in DTYPES or min(place.shape, default=1) < 0:
            raise description_error(f"tensor {place.name!r} has the type {place.dtype} and the shape {place.shape}")
        path, size = self._files.get((place.input, place.file)) or self._look_up(place)
        end = place.start + math.prod(place.shape) * DTYPES[place.dtype].bits // 8
        if end > size:
            raise description_error(f"tensor {place.name!r} is not in {place.file!r} of the input {place.input}")
        return TensorInfo(place.name, place.dtype, place.shape, path, place.start, end)

    def _look_up(self, place: _Place) -> tuple[Path, int]:
        """Return the path and size of a place's file; the size is -1 if the input does not have it."""
        folder = self._inputs[place.input]
        path, real = folder / place.file, file_in(folder, place.file)
        looked_up = path, real.stat().st_size if real and path.name == place.file else -1
        self._files[place.input, place.file] = looked_up
        return looked_up


def _plan_tensor(one: _Tensor, stored: _Stored) -> OutputTensor:
    """Check an entry against base and adapter, and return the tensor that the merge planned."""
    source, update = stored.find(one.source), None
    computed = one.update is not None or one.dtype != source.dtype
    if computed and not {one.dtype, source.dtype} <= FLOAT_TYPES.keys():
        raise description_error(f"tensor {one.name!r} cannot be computed from {source.dtype} in {one.dtype}")
    if one.update is not None:
        left, right = (
            Factor(stored.find(factor.place), factor.transposed) for factor in (one.update.left, one.update.right)
        )
        shapes = [len(factor.info.shape) for factor in (left, right)], len(source.shape)
        if shapes != ([2, 2], 2) or (left.shape[0], right.shape[1]) != source.shape or left.shape[1] != right.shape[0]:
            raise description_error(f"the update of {one.name!r} does not have its shape")
        update = Update(one.update.module, left, right, one.update.rank, one.update.scaling)
    nbytes = source.numel * DTYPES[one.dtype].bits // 8
    return OutputTensor(one.name, one.dtype, source.shape, one.start, nbytes, Value(source, update))
