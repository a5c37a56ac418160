"""Compare the weights of two models by samples at the same places of each tensor, few enough for a model of any size.

The same file on disk is not read. Otherwise some hundred bytes are read at a few places per tensor and the first difference ends
the comparison. A copy in another float type is compared after rounding to the coarser type.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from slipway.errors import CheckpointValidationError
from slipway.model.dtypes import DTYPES
from slipway.model.model_files import MODEL_WEIGHTS, has_safetensors, model_files, pickle_files
from slipway.model.safetensors_file import TensorInfo

MOST_TENSORS = 4096
"""Most tensors to sample, spread evenly over all."""
_COARSEST, _SMALLEST = 2.0**-7, 2.0**-24
"""Relative rounding step of bfloat16, and the smallest float16 value."""

_PLACES = 4
_SAMPLE_BYTES = 1024
_FLOATS = ("F32", "BF16", "F16")
_MOST_OPEN = 64


class Outcome(Enum):
    """Outcome of a comparison. ``UNKNOWN`` for weights: some types are not comparable, or only vocabulary rows differ."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ComparedWeights:
    """The outcome, the number of sampled tensors, and the first that differs."""

    outcome: Outcome
    tensors: int = 0
    name: str = ""


def same_files(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same weight files: links to one file, or one blob of the Hugging Face cache."""
    try:
        names, theirs = _weight_files(one), _weight_files(other)
        return bool(names) and names == theirs and all((one / name).samefile(other / name) for name in names)
    except (CheckpointValidationError, OSError):
        return False


def _weight_files(folder: Path) -> list[str]:
    if not has_safetensors(folder):
        return sorted({path.name for path in pickle_files(folder).values()})
    if (folder / MODEL_WEIGHTS).is_file():
        return [MODEL_WEIGHTS]
    return sorted(path.name for path in model_files(folder) if path.suffix == ".safetensors")


def compare_weights(
    pairs: Sequence[tuple[TensorInfo, TensorInfo]], *, in_vocabulary: Callable[[TensorInfo], bool]
) -> ComparedWeights:
    """Compare tensors of two models at a bounded number of places.

    Args:
        pairs: Tensors of the same name, with equal shapes except for the number of rows.
        in_vocabulary: Returns whether a tensor has one row per token. Tools repair and extend those rows, so a difference in
            them alone proves nothing.
    """
    ordered = sorted(pairs, key=lambda pair: pair[0].name)
    step = -(-len(ordered) // MOST_TENSORS) or 1
    compared, odd, skipped = 0, "", ""
    with _Files() as files:
        for one, other in ordered[::step]:
            try:
                same = _have_same_values(one, other, files)
            except (OSError, EOFError):
                return ComparedWeights(Outcome.UNKNOWN)
            if same is None:
                skipped = skipped or one.name
                continue
            compared += 1
            if not same and in_vocabulary(one):
                odd = odd or one.name
            elif not same:
                return ComparedWeights(Outcome.OTHER, compared, one.name)
    if odd or skipped or not compared:
        return ComparedWeights(Outcome.UNKNOWN, compared, odd)
    return ComparedWeights(Outcome.SAME, compared)


def _have_same_values(one: TensorInfo, other: TensorInfo, files: _Files) -> bool | None:
    """Return whether the samples agree; None for types not converted here, or if rounding explains the differences."""
    count = min(one.numel, other.numel)  # a resized vocabulary has its extra rows at the end
    if not count:
        return True
    mixed = one.dtype != other.dtype
    bits, their_bits = DTYPES[one.dtype].bits, DTYPES[other.dtype].bits
    if bits % 8 or (mixed and not {one.dtype, other.dtype} <= set(_FLOATS)):
        return None
    width, their_width = bits // 8, their_bits // 8
    sample = min(count, _SAMPLE_BYTES // width)
    samples, equal = [], True
    for place in range(_PLACES):
        first = (count - sample) * place // (_PLACES - 1)
        mine = files.read(one, first * width, sample * width)
        theirs = files.read(other, first * their_width, sample * their_width)
        if not mixed and mine != theirs:
            if one.dtype != "F32":
                return False
            equal = False
        samples.append((mine, theirs))
    ours, others = b"".join(mine for mine, _ in samples), b"".join(their_sample for _, their_sample in samples)
    if equal and (not mixed or _is_rounded_copy(one.dtype, other.dtype, ours, others)):
        return True
    return None if _may_be_rounded_twice(one.dtype, other.dtype, ours, others) else False


def _may_be_rounded_twice(dtype: str, other: str, ours: bytes, theirs: bytes) -> bool:
    """Return whether both may be copies of one original through different 16-bit types; close fine-tunes look like that too."""
    mine, others = _as_float32(dtype, ours), _as_float32(other, theirs)
    if dtype == other and not any(all(_is_bfloat16(value) for value in values) for values in (mine, others)):
        return False
    return all(abs(a - b) <= _COARSEST * max(abs(a), abs(b)) + _SMALLEST for a, b in zip(mine, others, strict=True))


def _is_bfloat16(value: float) -> bool:
    return struct.pack("<f", value)[:2] == b"\0\0"


def _is_rounded_copy(dtype: str, other: str, ours: bytes, theirs: bytes) -> bool:
    """Return whether all values of one float type are the other's, rounded to nearest or truncated alike."""
    if (dtype, other) in {("BF16", "F32"), ("F16", "F32"), ("BF16", "F16")}:
        dtype, other, ours, theirs = other, dtype, theirs, ours
    exact = _as_float32(dtype, ours)
    if other == "F16":  # from F32
        return _as_float16(exact) == theirs
    stored = array("H", theirs)  # BF16, from F32 or F16
    words = array("I", struct.pack(f"<{len(exact)}f", *exact))
    nearest = [(word + 0x7FFF + (word >> 16 & 1)) >> 16 & 0xFFFF for word in words]
    if list(stored) == nearest or list(stored) == [word >> 16 for word in words]:
        return True
    # F16 made from BF16: F16 has more digits, so only values outside its range change.
    return dtype == "F16" and _as_float16(_as_float32("BF16", theirs)) == ours


def _as_float32(dtype: str, data: bytes) -> tuple[float, ...]:
    match dtype:
        case "F32":
            return struct.unpack(f"<{len(data) // 4}f", data)
        case "F16":
            return struct.unpack(f"<{len(data) // 2}e", data)
    words = array("I", [word << 16 for word in array("H", data)])
    return struct.unpack(f"<{len(words)}f", words.tobytes())


def _as_float16(values: Sequence[float]) -> bytes:
    """Return values as little-endian float16, rounded to nearest; values out of range become infinite."""
    packed = []
    for value in values:
        try:
            packed.append(struct.pack("<e", value))
        except OverflowError:
            packed.append(struct.pack("<e", float("inf") if value > 0 else float("-inf")))
    return b"".join(packed)


class _Files:
    """Files kept open while their tensors are sampled; unbuffered, because every read is at another place."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, BinaryIO] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, tensor: TensorInfo, offset: int, count: int) -> bytes:
        """Return some bytes of a tensor.

        Raises:
            OSError: The file cannot be read.
            EOFError: The file ends before them.
        """
        if tensor.file not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._stack.close()
                self._open.clear()
            self._open[tensor.file] = self._stack.enter_context(tensor.file.open("rb", buffering=0))
        data = os.pread(self._open[tensor.file].fileno(), count, tensor.start + offset)
        if len(data) != count:
            raise EOFError(tensor.file)
        return data
