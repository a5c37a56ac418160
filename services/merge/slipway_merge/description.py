"""The description of a merge whose weights are left out: of which stored bytes each weight is made.

It comes back from a store, so every place in it is checked against base and adapter before a byte is read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipway.files.json_documents import LARGEST_LIST
from slipway.files.paths import file_in
from slipway.files.regular_file import read_regular
from slipway.model.dtypes import DTYPES
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.reading import DEFERRED, description_error
from slipway_merge.tensors.outputs import Factor, Layout, OutputTensor, Update, Value
from slipway_merge.tensors.tensor_io import FLOAT_TYPES, TensorReader

_SAMPLE_BYTES = 64


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
    fingerprint = _fingerprint(_plan_tensor(tensor, stored) for tensor in tensors)
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


def read_description(folder: Path, inputs: Mapping[str, Path]) -> list[tuple[OutputTensor, str]]:
    """Return every tensor that a merge planned, with the file that would hold it.

    Args:
        folder: The merge's output.
        inputs: The folders ``base`` and ``adapter`` of the merge; other inputs are ignored.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` if the description does not fit base and adapter.
    """
    recipe, stored = _read(folder), _Stored(inputs)
    if len({tensor.name for tensor in recipe.tensors}) < len(recipe.tensors):
        raise description_error("it names a tensor twice")
    planned = [_plan_tensor(tensor, stored) for tensor in recipe.tensors]
    if _fingerprint(planned) != recipe.fingerprint:
        raise description_error("base or adapter is not the one that was merged")
    return [(tensor, one.file) for tensor, one in zip(planned, recipe.tensors, strict=True)]


def _stored_tensors(tensors: Iterable[OutputTensor]) -> Iterator[TensorInfo]:
    """Yield every stored tensor that some tensors are made of, in order."""
    for tensor in tensors:
        yield tensor.value.source
        if tensor.value.update is not None:
            yield from (tensor.value.update.left.info, tensor.value.update.right.info)


def _fingerprint(tensors: Iterable[OutputTensor]) -> str:
    """Return a digest of the places of stored tensors and of some bytes of each, so that other weights of the same shapes are noticed."""
    sha = hashlib.sha256()
    with TensorReader() as reader:
        for info in _stored_tensors(tensors):
            sha.update(repr((info.file.name, info.name, info.dtype, info.shape, info.start)).encode())
            buffer = np.empty(min(_SAMPLE_BYTES, info.nbytes), np.uint8)
            for offset in (0, (info.nbytes - buffer.nbytes) // 2):
                reader.fill(buffer, info, offset)
                sha.update(buffer.data)
    return sha.hexdigest()


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
