"""Read and check safetensors headers without torch: names, types, shapes and offsets of the tensors in a file.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, then the tensors' bytes without
gaps). The tensors are not read, so a 100 GB model is described in milliseconds, and a truncated file is detected before any work
begins.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.errors import CheckpointValidationError
from slipway.files.json_documents import LARGEST_LIST, parse_json, read_json
from slipway.files.paths import file_in
from slipway.files.regular_file import open_regular
from slipway.model.dtypes import DTYPES
from slipway.texts import counted

MAX_HEADER_BYTES = 64 << 20
"""Enough for the most tensors a file may have, with long names; the reference implementation allows 100 MB."""
MOST_TENSORS = 1 << 18
"""Most tensors of one file. An adapter of every expert of the largest known mixture has 138,240: 60 layers × 384 experts × 3 weights × A and B."""
MOST_TENSORS_OF_A_MODEL = 1 << 20
_VALUES_PER_TENSOR = 10
"""Commas and opening brackets of an entry: 8 with two dimensions, one more for each further one."""
_MOST_DIMENSIONS = 64
_LONGEST_NAME = 1024
_LARGEST_SIZE = (1 << 63) - 1
METADATA = "__metadata__"
"""Key of a header that names no tensor."""
INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. ``start`` and ``end`` are absolute byte offsets in ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A checked header: tensors in the order of their bytes, and the file's own metadata."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] = field(default_factory=dict)


def corrupt_error(path: Path, what: str, **about: object) -> CheckpointValidationError:
    """Return the error for a damaged file; it names the file and the fault."""
    return CheckpointValidationError(
        f"{path} is not a valid safetensors file: {what}",
        reason="SAFETENSORS_CORRUPT",
        remedy="copy or download the file again, or use another checkpoint",
        about={"file": path, **about},
    )


def read_safetensors(path: Path) -> SafetensorsFile:
    """Read and fully check the header of one file.

    Raises:
        CheckpointValidationError: ``SAFETENSORS_CORRUPT`` if lengths, JSON, types, shapes or offsets are not
            consistent with each other and with the file's size; ``FILE_ERROR`` if it cannot be read.
    """
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or size < 8 + length:
                needed = 8 + length if len(prefix) == 8 else 8
                raise corrupt_error(path, f"it has {size} bytes but its header alone needs {needed} (truncated)")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise corrupt_error(path, f"its header length is {length}, outside 2…{MAX_HEADER_BYTES}")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointValidationError(
            f"cannot read {path}: {error.strerror}", reason="FILE_ERROR", about={"file": path}
        ) from error
    header = _parse(path, raw)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt_error(path, f"{METADATA} is not a map of strings")
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end, tensor.name))
    _check_contiguous(path, tensors, first=8 + length, size=size)
    return SafetensorsFile(path, {tensor.name: tensor for tensor in tensors}, metadata)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    if raw.count(b'"data_offsets"') > MOST_TENSORS:
        raise corrupt_error(path, f"its header names more than {MOST_TENSORS} tensors")
    try:
        header = parse_json(raw, most_values=_VALUES_PER_TENSOR * MOST_TENSORS)
    except ValueError as error:
        raise corrupt_error(path, f"its header is not JSON of tensors ({error})") from error
    if not isinstance(header, dict):
        raise corrupt_error(path, f"its header is a JSON {type(header).__name__}, not an object")
    return header


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_SIZE


def _tensor(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    if len(name) > _LONGEST_NAME:
        raise corrupt_error(path, f"it has a tensor with a name of {len(name)} characters, {name[:100]!r}…")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise corrupt_error(path, f"the entry of tensor {name!r} is not {{dtype, shape, data_offsets}}", tensor=name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise corrupt_error(path, f"tensor {name!r} has the unknown data type {reprlib.repr(dtype)}", tensor=name)
    count = _elements(shape)
    if count is None:
        raise corrupt_error(path, f"tensor {name!r} has the impossible shape {reprlib.repr(shape)}", tensor=name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise corrupt_error(path, f"tensor {name!r} has impossible offsets {reprlib.repr(offsets)}", tensor=name)
    start, end = offsets
    bits = count * DTYPES[dtype].bits
    if bits != (end - start) * 8:
        what = f"tensor {name!r} {dtype} {tuple(shape)} takes {-(-bits // 8)} bytes but its offsets {start}…{end} hold "
        raise corrupt_error(path, what + str(end - start), tensor=name)
    return TensorInfo(name, dtype, tuple(shape), path, data + start, data + end)


def _elements(shape: object) -> int | None:
    """Return the number of elements of a shape; None for an invalid shape or one too large for any file.

    As in the reference implementation, factors before a zero count too.
    """
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS or not all(map(_is_size, shape)):
        return None
    count = 1
    for size in shape:
        count *= size
        if count > _LARGEST_SIZE:
            return None
    return count


def _check_contiguous(path: Path, tensors: list[TensorInfo], *, first: int, size: int) -> None:
    position = first
    for tensor in tensors:
        if tensor.end > size:
            what = f"tensor {tensor.name!r} ends at byte {tensor.end} of a file of {size} (truncated)"
            raise corrupt_error(path, what, tensor=tensor.name)
        if tensor.start != position:
            kind = "overlaps the one before it" if tensor.start < position else "leaves a gap before it"
            raise corrupt_error(path, f"tensor {tensor.name!r} {kind}", tensor=tensor.name)
        position = tensor.end
    if position != size:
        raise corrupt_error(path, f"{size - position} bytes follow its last tensor")


def read_weights(folder: Path, *, stem: str = "model") -> dict[str, TensorInfo]:
    """Return every tensor of a model folder, from ``<stem>.safetensors`` or the shards its index names, in stored order.

    Like transformers, prefer a single file to an index. Tensors of a shard that the index does not name count too.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` if there are no safetensors weights, or if the index is unreadable, names
            a missing shard, or names a tensor that its shard does not hold; ``SAFETENSORS_CORRUPT`` if a file is damaged or two
            shards hold the same tensor.
    """
    single = folder / f"{stem}.safetensors"
    if file_in(folder, single.name) is not None:
        return dict(read_safetensors(single).tensors)
    weight_map = read_index(folder / f"{stem}{INDEX_SUFFIX}")
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in read_safetensors(folder / shard).tensors.items():
            if name in tensors:
                raise corrupt_error(folder / shard, f"tensor {name!r} is in {tensors[name].file.name} too", tensor=name)
            tensors[name] = tensor
        if len(tensors) > MOST_TENSORS_OF_A_MODEL:
            raise corrupt_error(folder / shard, f"with it the model has more than {MOST_TENSORS_OF_A_MODEL} tensors")
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise _invalid_error(folder, f"the index says that {shard} holds {name!r}, but it does not", tensor=name)
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """Return the ``weight_map`` (tensor → shard) of a sharded model's index, whose shards all exist beside it.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``.
    """
    folder = path.parent
    try:
        index = read_json(path, largest=LARGEST_LIST)
    except FileNotFoundError as error:
        stem = path.name.removesuffix(INDEX_SUFFIX)
        raise _invalid_error(folder, f"it has neither {stem}.safetensors nor {path.name}") from error
    except OSError as error:
        raise _invalid_error(folder, f"{path.name} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _invalid_error(folder, f"{path.name} is not readable JSON ({error})") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise _invalid_error(folder, f"{path.name} has no weight_map of tensor names to files")
    tensors = Counter(weight_map.values())
    for shard in sorted(tensors):
        if Path(shard).name != shard or shard in {"", ".", ".."}:
            raise _invalid_error(folder, f"{path.name} names {shard!r}, which is not a file beside it", shard=shard)
        if file_in(folder, shard) is None:
            raise _invalid_error(folder, f"shard {shard} ({counted(tensors[shard], 'tensor')}) is missing", shard=shard)
    return weight_map


def _invalid_error(folder: Path, what: str, **about: object) -> CheckpointValidationError:
    return CheckpointValidationError(
        f"{folder} is not a complete model: {what}",
        reason="BASE_MODEL_INVALID",
        remedy="download or copy the model again, completely",
        about={"folder": folder, **about},
    )
