"""The named tensors of a stored model, read one at a time: from safetensors, or from pickles that are mapped, not loaded."""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from slipway.counts import counted
from slipway.errors import CheckpointValidationError
from slipway.models.dtypes import FLOATS, torch_dtypes
from slipway.models.model_files import has_safetensors, pickle_files
from slipway.models.safetensors_file import METADATA, corrupt, read_weights
from slipway.sizes import format_size
from slipway_prepare.faults import invalid
from slipway_prepare.pickle_archive import check_archive

BLOCK_BYTES = 8 << 20
_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is no text."""
_MOST_TIMES_STORED = 4
"""How large tensors may be together, as a multiple of their file: T5 has its embedding under four names."""
#: Errors that torch's restricted unpickler raises on damaged bytes; for code it raises ``UnpicklingError``.
_DAMAGED = (
    RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError, AssertionError, OverflowError, struct.error,
)  # fmt: skip
#: Types that are read, by their safetensors names.
DTYPES = torch_dtypes(*FLOATS, "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64", "I32", "I16", "I8", "U8", "BOOL")


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source(Protocol):
    """The stored tensors of a model."""

    tensors: Mapping[str, Stored]
    aliases: tuple[tuple[str, ...], ...]
    """Groups of names that share one tensor in memory, each sorted; only pickles have them."""

    def __enter__(self) -> Self:
        """Keep files open while the context lasts."""
        ...

    def __exit__(self, *_: object) -> None:
        """Close them."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a whole tensor."""
        ...

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor's elements in order, as flat blocks."""
        ...


def open_source(folder: Path) -> Source:
    """Return the weights of a model folder; like transformers, prefer safetensors.

    Raises:
        CheckpointValidationError: ``SAFETENSORS_CORRUPT``, ``BASE_MODEL_INVALID``, ``UNSAFE_PICKLE`` or ``DTYPE_UNSUPPORTED``.
    """
    return SafetensorsSource(folder) if has_safetensors(folder) else pickled_model(folder)


class SafetensorsSource:
    """Tensors of safetensors files, read by position, so that a file truncated meanwhile is an error, not a crash."""

    aliases: tuple[tuple[str, ...], ...] = ()

    def __init__(self, folder: Path) -> None:
        self._infos = read_weights(folder)
        self.tensors: Mapping[str, Stored] = {
            name: Stored(name, _known(name, info.dtype), info.shape) for name, info in self._infos.items()
        }
        self._stack = ExitStack()
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """Return a whole tensor."""
        stored = self.tensors[name]
        return self._bytes(name, 0, self._infos[name].nbytes).view(stored.dtype).reshape(stored.shape)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor's elements in order, as flat blocks."""
        for start in range(0, self._infos[name].nbytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, self._infos[name].nbytes - start)
            yield self._bytes(name, start, size).view(self.tensors[name].dtype)

    def _bytes(self, name: str, start: int, size: int) -> Tensor:
        info = self._infos[name]
        if info.file not in self._open:
            self._open[info.file] = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._open[info.file])
        buffer = torch.empty(size, dtype=torch.uint8)
        view, position = buffer.numpy().data, info.start + start
        while view:
            count = os.preadv(self._open[info.file], [view], position)
            if count == 0:
                raise corrupt(info.file, f"it ends at byte {position}, within tensor {name!r}", tensor=name)
            view, position = view[count:], position + count
        return buffer


class MappedTensors:
    """Tensors of pickles, mapped into memory."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        types = set(DTYPES.values())
        unknown = [name for name, value in values.items() if value.dtype not in types]
        if unknown:
            _known(unknown[0], str(values[unknown[0]].dtype))
        self._values = dict(values)
        self.tensors: Mapping[str, Stored] = {
            name: Stored(name, value.dtype, tuple(value.shape)) for name, value in values.items()
        }
        self.aliases = _aliases(values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._values.clear()

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, mapped from the file."""
        return self._values[name].detach().contiguous()

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor's elements in order, as flat blocks."""
        flat = self.read(name).reshape(-1)
        step = BLOCK_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            yield flat[start : start + step]


def pickled_model(folder: Path) -> MappedTensors:
    """Map the ``pytorch_model.bin`` files of a model into memory, and unpickle them without running anything.

    Raises:
        CheckpointValidationError: As :func:`open_source`.
    """
    values: dict[str, Tensor] = {}
    weight_map = pickle_files(folder)
    for path in sorted(set(weight_map.values())):
        found = checked(dict(sorted(load_pickle(path).items(), key=lambda item: str(item[0]))), path)
        if twice := sorted(found.keys() & values.keys()):
            raise invalid(f"has tensor {twice[0]!r} in two files, one is {path.name}", tensor=twice[0], file=path)
        values |= found
    missing = sorted(name for name in weight_map if name and name not in values)
    if missing:
        raise invalid(
            f"lacks {counted(len(missing), 'tensor')} that its index names, first {missing[0]!r}", tensor=missing[0]
        )
    return MappedTensors(values)


def checked(loaded: Mapping[object, object], path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle's dictionary.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` for what is no tensor, or cannot be read from the file as it is.
    """
    size, found = path.stat().st_size, dict[str, Tensor]()
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise invalid(f"has {name!r} in {path.name}, a {type(value).__name__} instead of a tensor", file=path)
        if name == METADATA or _HALF.search(name):
            raise invalid(
                f"has a tensor named {name!a} in {path.name}, which a safetensors file cannot hold",
                remedy="save it again with other names",
                tensor=ascii(name),
            )
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise invalid(f"has tensor {name!r} in {path.name} in a layout that cannot be read", tensor=name)
        if value.numel() * value.element_size() > size:  # strides of zero repeat stored values
            raise invalid(f"has tensor {name!r} in {path.name}, which is larger than the file", tensor=name)
        found[name] = value
    _check_sizes(found, path, size)
    return found


def _check_sizes(values: Mapping[str, Tensor], path: Path, size: int) -> None:
    """Refuse views of the same stored values that are together larger than their file; tensors of several names may be there twice or so."""
    groups = {names[0]: len(names) for names in _aliases(values)}
    shared = {name for names in _aliases(values) for name in names[1:]}
    every = {name: value.numel() * value.element_size() for name, value in values.items()}
    distinct = sum(nbytes for name, nbytes in every.items() if name not in shared)
    if distinct > size or sum(every.values()) > _MOST_TIMES_STORED * size:
        most = max(groups, key=lambda name: groups[name] * every[name], default=max(every, key=every.__getitem__))
        raise invalid(
            f"has {format_size(sum(every.values()))} of tensors in {path.name}, a file of {format_size(size)}: they overlap, such as {most!r}",
            remedy="save each tensor as a copy of its own (tensor.clone()) in a safetensors file",
            tensor=most,
        )


def load_pickle(path: Path) -> dict[object, object]:
    """Unpickle a file of weights, mapped into memory, without running anything.

    Only ``torch.load(weights_only=True, mmap=True)`` is used, which takes the zip format that torch writes since 1.6.

    Raises:
        CheckpointValidationError: ``UNSAFE_PICKLE`` or ``BASE_MODEL_INVALID``.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointValidationError(
            f"{path} is damaged or a pickle in the format of torch before version 1.6 (plain or tar): "
            "it cannot be mapped, so it is not read",
            reason="UNSAFE_PICKLE",
            remedy="use a safetensors revision of the model, or, if you trust it, save it again: "
            "torch.save(torch.load(f, weights_only=True), f)",
            about={"file": path},
        )
    check_archive(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointValidationError(
            f"{path} is a pickle that would run code when loaded: {(str(error).strip() or 'it is not readable').splitlines()[0][:300]}",
            reason="UNSAFE_PICKLE",
            remedy="use a safetensors revision of the model; do not load this file elsewhere unless you trust its source",
            about={"file": path},
        ) from error
    except _DAMAGED as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise invalid(f"has an unreadable file {path.name} ({said})", file=path) from error
    if not isinstance(loaded, dict):
        raise invalid(f"has a {type(loaded).__name__} in {path.name} instead of a dictionary of tensors", file=path)
    return loaded


def _aliases(values: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    groups: dict[object, list[str]] = {}
    for name, value in sorted(values.items()):
        if value.numel():
            key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            groups.setdefault(key, []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _known(name: str, dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise CheckpointValidationError(
            f"tensor {name!r} of the base model has data type {dtype}, which is not supported",
            reason="DTYPE_UNSUPPORTED",
            remedy="use the 16-bit version of the base model",
            about={"tensor": name, "dtype": dtype},
        )
    return DTYPES[dtype]
