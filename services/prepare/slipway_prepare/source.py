"""The named tensors of a stored model, read one at a time: from safetensors, or from pickles that are mapped, not loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from slipway.errors import CheckpointValidationError
from slipway.model.dtypes import FLOATS, torch_dtypes
from slipway.model.model_files import has_safetensors, pickle_files
from slipway.model.safetensors_file import corrupt_error, read_weights
from slipway.texts import counted
from slipway_prepare.faults import invalid_error
from slipway_prepare.pickles.loading import aliases, check_tensors, load_pickle

BLOCK_BYTES = 8 << 20
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


def open_source(folder: Path, scratch: Path) -> Source:
    """Open the weights of a model folder; like transformers, prefer safetensors.

    Args:
        folder: The folder.
        scratch: Folder for pickles of an older format, which are written anew before they are mapped.

    Raises:
        CheckpointValidationError: ``SAFETENSORS_CORRUPT``, ``BASE_MODEL_INVALID``, ``UNSAFE_PICKLE`` or ``DTYPE_UNSUPPORTED``.
    """
    return SafetensorsSource(folder) if has_safetensors(folder) else pickled_model(folder, scratch)


class SafetensorsSource:
    """Tensors of safetensors files, read by position, so that a file truncated meanwhile is an error, not a crash."""

    aliases: tuple[tuple[str, ...], ...] = ()

    def __init__(self, folder: Path) -> None:
        self._infos = read_weights(folder)
        self.tensors: Mapping[str, Stored] = {
            name: Stored(name, _find_dtype(name, info.dtype), info.shape) for name, info in self._infos.items()
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
                raise corrupt_error(info.file, f"it ends at byte {position}, within tensor {name!r}", tensor=name)
            view, position = view[count:], position + count
        return buffer


class MappedTensors:
    """Tensors of pickles, mapped into memory."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        types = set(DTYPES.values())
        unknown = [name for name, value in values.items() if value.dtype not in types]
        if unknown:
            _find_dtype(unknown[0], str(values[unknown[0]].dtype))
        self._values = dict(values)
        self.tensors: Mapping[str, Stored] = {
            name: Stored(name, value.dtype, tuple(value.shape)) for name, value in values.items()
        }
        self.aliases = aliases(values)

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


def pickled_model(folder: Path, scratch: Path) -> MappedTensors:
    """Map the ``pytorch_model.bin`` files of a model into memory, and unpickle them without running anything.

    Raises:
        CheckpointValidationError: As :func:`open_source`.
    """
    values: dict[str, Tensor] = {}
    weight_map = pickle_files(folder)
    for path in sorted(set(weight_map.values())):
        tensors = check_tensors(dict(sorted(load_pickle(path, scratch).items(), key=lambda item: str(item[0]))), path)
        if twice := sorted(tensors.keys() & values.keys()):
            raise invalid_error(f"has tensor {twice[0]!r} in two files, one is {path.name}", tensor=twice[0], file=path)
        values |= tensors
    missing = sorted(name for name in weight_map if name and name not in values)
    if missing:
        raise invalid_error(
            f"lacks {counted(len(missing), 'tensor')} that its index names, first {missing[0]!r}", tensor=missing[0]
        )
    return MappedTensors(values)


def _find_dtype(name: str, dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise CheckpointValidationError(
            f"tensor {name!r} of the base model has data type {dtype}, which is not supported",
            reason="DTYPE_UNSUPPORTED",
            remedy="use the 16-bit version of the base model",
            about={"tensor": name, "dtype": dtype},
        )
    return DTYPES[dtype]
