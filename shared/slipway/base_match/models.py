"""Compare two model folders: kind and sizes by their configurations, shapes by headers, then values by samples.

The same file on disk is not read. Otherwise some hundred bytes are read at the same few places of each tensor, which is little enough
for a model of any size, and the first difference ends the comparison. A copy in another float type is compared after rounding to
the coarser type.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from slipway.base_match.recorded import read_known_json
from slipway.errors import CheckpointValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.dtypes import DTYPES
from slipway.model.model_files import CONFIG, MODEL_WEIGHTS, has_safetensors, model_files, pickle_files
from slipway.model.safetensors_file import TensorInfo, read_weights

MOST_TENSORS = 4096
"""Most tensors to sample, spread evenly over all."""
_COARSEST, _SMALLEST = 2.0**-7, 2.0**-24
"""Relative rounding step of bfloat16, and the smallest float16 value."""

_PLACES = 4
_SAMPLE_BYTES = 1024
_FLOATS = ("F32", "BF16", "F16")
_MOST_OPEN = 64

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
)
"""Settings that no copy, conversion or quantization of a model changes. (The vocabulary's size can change.)"""

_BUFFER = re.compile(r".*\.(?:rotary_emb\.inv_freq|masked_bias|position_ids)")
_CAUSAL_MASK = re.compile(r".*\.(?:attn|attention)\.bias")
_SHOWN = 200
"""Characters of a tensor's name in a message."""


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


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome and its evidence, as part of a sentence about the model in use."""

    outcome: Outcome
    what: str


def compare_models(used: Path, recorded: Path, *, contents: bool) -> Comparison:
    """Compare the model in use with the one that the adapter names.

    The same weights in another type, other shards, a tied head that is stored or not, and a vocabulary with more rows do not make
    another model. Quantized and pickled models are compared by their configuration only.

    Args:
        used: The model in use.
        recorded: The model that the adapter names.
        contents: Whether the weights of ``used`` can be read, not only their headers.
    """
    settings = [read_known_json(folder / CONFIG) for folder in (used, recorded)]
    if not all(isinstance(each, dict) for each in settings):
        return Comparison(Outcome.UNKNOWN, f"{CONFIG} of one of them cannot be read")
    ours, theirs = map(ModelConfig, settings)
    if other := _other_kind(ours, theirs):
        return Comparison(Outcome.OTHER, other)
    if contents and same_files(used, recorded):
        return Comparison(Outcome.SAME, "their weights are the same files")
    if why := _incomparable_reason(ours, theirs) or _pickle_reason(used, recorded):
        return Comparison(Outcome.UNKNOWN, why)
    try:
        weights = read_weights(used), read_weights(recorded)
    except (CheckpointValidationError, OSError):
        return Comparison(Outcome.UNKNOWN, "the weights of one of them cannot be read")
    return _compare_tensors(*weights, contents=contents, vocabularies={vocabulary_size(ours), vocabulary_size(theirs)})


def _compare_tensors(
    ours: Mapping[str, TensorInfo], theirs: Mapping[str, TensorInfo], *, contents: bool, vocabularies: set[int]
) -> Comparison:
    ours = {name: info for name, info in ours.items() if not _is_buffer(info)}
    common = [(info, theirs[name]) for name, info in ours.items() if name in theirs]
    for one, other in common:
        if one.shape != other.shape and not _is_resized(one, other, vocabularies):
            return Comparison(Outcome.OTHER, f"{one.name[:_SHOWN]!r} has the shape {one.shape} and not {other.shape}")
    if not contents:
        return Comparison(Outcome.UNKNOWN, "their shapes agree, and the weights lie in a bucket")
    in_vocabulary = partial(_is_in_vocabulary, vocabularies=vocabularies)
    of_layers = sum(
        info.nbytes for info in ours.values() if not in_vocabulary(info)
    )  # no vocabulary: a tied head may be stored or not
    if 10 * sum(one.nbytes for one, _ in common if not in_vocabulary(one)) < 9 * of_layers:
        return Comparison(Outcome.UNKNOWN, "most of their weights have other names")
    result = compare_weights(common, in_vocabulary=in_vocabulary)
    match result.outcome:
        case Outcome.SAME:
            return Comparison(Outcome.SAME, f"their weights agree, in samples of {result.tensors} tensors")
        case Outcome.OTHER:
            return Comparison(Outcome.OTHER, f"{result.name[:_SHOWN]!r} has other values")
    what = (
        f"only rows of the vocabulary differ ({result.name[:_SHOWN]!r})"
        if result.name
        else "their weights are stored in types that are not compared"
    )
    return Comparison(Outcome.UNKNOWN, what)


def _is_buffer(info: TensorInfo) -> bool:
    """Return whether a tensor is a buffer that some versions of the model's code save and others compute."""
    return bool(_BUFFER.fullmatch(info.name)) or (len(info.shape) == 4 and bool(_CAUSAL_MASK.fullmatch(info.name)))


def _incomparable_reason(ours: ModelConfig, theirs: ModelConfig) -> str:
    """Return why the weights of two related models cannot be compared; empty when they can."""
    if _type_of(ours) != _type_of(theirs):  # one is the text part of a composite model
        return f"one of them is a {_type_of(ours)}, the other a {_type_of(theirs)}"
    if ours.quantization or theirs.quantization:
        return "one of them is quantized, so that their weights cannot be compared"
    return ""


def _pickle_reason(used: Path, recorded: Path) -> str:
    if has_safetensors(used) and has_safetensors(recorded):
        return ""
    return "the weights of one of them are a pickle, which is not opened here"


def _other_kind(ours: ModelConfig, theirs: ModelConfig) -> str:
    """Return the difference that makes a configuration another model's; empty if there is none."""
    one, other = _type_of(ours), _type_of(theirs)
    if one != other and one and other and one not in _parts(theirs) and other not in _parts(ours):
        return f"model_type is {one!r} ({_classes(ours)}) and not {other!r} ({_classes(theirs)})"
    text, their_text = ours.text, theirs.text
    for key in _SIZES:
        size, their_size = text.get(key), their_text.get(key)
        if isinstance(size, int) and isinstance(their_size, int) and size != their_size:
            return f"{key} is {size} and not {their_size}"
    return ""


def _type_of(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    return kind[:100] if isinstance(kind, str) else ""


def _parts(config: Mapping[str, Any]) -> set[str]:
    """Return the model types of the parts of a composite model."""
    return {_type_of(part) for part in config.values() if isinstance(part, dict)}


def _classes(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return ", ".join(str(name)[:100] for name in names[:3]) if isinstance(names, list) and names else "no architectures"


def _is_in_vocabulary(info: TensorInfo, *, vocabularies: set[int]) -> bool:
    """Return whether a tensor has one row per token, like the embedding and the head."""
    return bool(info.shape) and info.shape[0] in vocabularies


def _is_resized(one: TensorInfo, other: TensorInfo, vocabularies: set[int]) -> bool:
    """Return whether two tensors differ only in the number of vocabulary rows; an unknown size (0) allows any number."""
    rows = {info.shape[0] for info in (one, other) if info.shape}
    return one.shape[1:] == other.shape[1:] and len(rows) == 2 and (0 in vocabularies or bool(rows & vocabularies))


def vocabulary_size(config: ModelConfig) -> int:
    """Return the number of embedding rows by the configuration of the text part; 0 if it does not say."""
    size = config.text.get("vocab_size")
    return size if isinstance(size, int) else 0
