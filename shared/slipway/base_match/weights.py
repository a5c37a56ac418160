"""Weights of two models compared by samples: the same places of each tensor, few enough for a model of any size.

A file that is the same on disk needs no reading. Otherwise some hundred bytes are read at a few places per tensor, the first
difference ends the comparison, and a copy in another float type is compared after rounding to the coarser one.
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
from slipway.models.dtypes import DTYPES
from slipway.models.model_files import MODEL_WEIGHTS, has_safetensors, model_files, pickle_files
from slipway.models.safetensors_file import TensorInfo

MOST_TENSORS = 4096
"""Tensors sampled at most, spread evenly over all of them."""
_COARSEST, _SMALLEST = 2.0**-7, 2.0**-24
"""A step of bfloat16, and the smallest of float16."""

_PLACES = 4
_SAMPLE_BYTES = 1024
_FLOATS = ("F32", "BF16", "F16")
_MOST_OPEN = 64


class WeightsOutcome(Enum):
    """How the weights compare. ``UNKNOWN``: some types are not comparable, or only the vocabulary's rows differ."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ComparedWeights:
    """The outcome, how many tensors were sampled, and the first that differs."""

    outcome: WeightsOutcome
    tensors: int = 0
    name: str = ""


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weight files: links to one file, or one blob of the Hugging Face cache."""
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
        pairs: Tensors of the same name, of equal shapes but for the number of rows.
        in_vocabulary: Whether a tensor has a row per token. Tools repair and extend those rows, so that a difference in
            them alone tells nothing.
    """
    ordered = sorted(pairs, key=lambda pair: pair[0].name)
    step = -(-len(ordered) // MOST_TENSORS) or 1
    compared, odd, skipped = 0, "", ""
    with _Files() as files:
        for one, other in ordered[::step]:
            try:
                same = _same_values(one, other, files)
            except (OSError, EOFError):
                return ComparedWeights(WeightsOutcome.UNKNOWN)
            if same is None:
                skipped = skipped or one.name
                continue
            compared += 1
            if not same and in_vocabulary(one):
                odd = odd or one.name
            elif not same:
                return ComparedWeights(WeightsOutcome.OTHER, compared, one.name)
    if odd or skipped or not compared:
        return ComparedWeights(WeightsOutcome.UNKNOWN, compared, odd)
    return ComparedWeights(WeightsOutcome.SAME, compared)


def _same_values(one: TensorInfo, other: TensorInfo, files: _Files) -> bool | None:
    """Whether the samples agree; None for types that are not converted here, and where another rounding explains the rest."""
    count = min(one.numel, other.numel)  # a resized vocabulary has its rows at the end
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
    ours, others = b"".join(mine for mine, _ in samples), b"".join(found for _, found in samples)
    if equal and (not mixed or _rounded_alike(one.dtype, other.dtype, ours, others)):
        return True
    return None if _rounded_twice(one.dtype, other.dtype, ours, others) else False


def _rounded_twice(dtype: str, other: str, ours: bytes, theirs: bytes) -> bool:
    """Whether both may be copies of one original through other 16-bit types; close fine-tunes look like that too."""
    mine, found = _as_float32(dtype, ours), _as_float32(other, theirs)
    if dtype == other and not any(all(_is_bfloat16(value) for value in values) for values in (mine, found)):
        return False
    return all(abs(a - b) <= _COARSEST * max(abs(a), abs(b)) + _SMALLEST for a, b in zip(mine, found, strict=True))


def _is_bfloat16(value: float) -> bool:
    return struct.pack("<f", value)[:2] == b"\0\0"


def _rounded_alike(dtype: str, other: str, ours: bytes, theirs: bytes) -> bool:
    """Whether one of two float types holds the other's values, rounded to nearest or cut off, in all samples alike."""
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
    # F16 made from BF16: it has more digits, so that only its small range loses some.
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
    """Values as little-endian float16, rounded to nearest; out of range is infinite."""
    packed = []
    for value in values:
        try:
            packed.append(struct.pack("<e", value))
        except OverflowError:
            packed.append(struct.pack("<e", float("inf") if value > 0 else float("-inf")))
    return b"".join(packed)


class _Files:
    """Files held open while their tensors are sampled; unbuffered, because every read is at another place."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, BinaryIO] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, tensor: TensorInfo, offset: int, count: int) -> bytes:
        """Bytes of a tensor.

        Raises:
            OSError: The file cannot be read.
            EOFError: It ends before.
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
