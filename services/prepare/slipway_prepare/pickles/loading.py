"""Read a file of pickled weights without running anything: mapped into memory, whatever its format."""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from slipway.model.safetensors_file import METADATA
from slipway.sizes import format_size
from slipway_prepare.faults import invalid, runs_code
from slipway_prepare.pickles.archive import check_archive
from slipway_prepare.pickles.legacy import as_archive, is_legacy

_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is no text."""
_MOST_TIMES_STORED = 4
"""How large tensors may be together, as a multiple of their file: T5 has its embedding under four names."""
#: Errors that torch's restricted unpickler raises on damaged bytes; for code it raises ``UnpicklingError``.
_DAMAGED = (
    RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError, AssertionError, OverflowError, struct.error,
)  # fmt: skip


def load_pickle(path: Path, scratch: Path) -> dict[object, object]:
    """Unpickle a file of weights, mapped into memory, without running anything.

    Only ``torch.load(weights_only=True, mmap=True)`` is used, which takes the zip format that torch writes since 1.6. An older file
    is written in that format first, by a process of its own.

    Args:
        path: The file.
        scratch: Folder for the newer file of an older one; it is removed at once, and its space is free when the tensors are.

    Raises:
        CheckpointValidationError: ``UNSAFE_PICKLE`` or ``BASE_MODEL_INVALID``.
    """
    if zipfile.is_zipfile(path):
        return _load_archive(path, path)
    if not is_legacy(path):
        raise invalid(f"has a file {path.name} that is damaged, or no file that torch saves", file=path)
    with as_archive(path, scratch) as archive:
        return _load_archive(archive, path)


def _load_archive(archive: Path, path: Path) -> dict[object, object]:
    """Load an archive that is, or was made of, the file at ``path``."""
    check_archive(archive, path)
    try:
        loaded = torch.load(archive, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise runs_code(path, str(error)) from error
    except _DAMAGED as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise invalid(f"has an unreadable file {path.name} ({said})", file=path) from error
    if not isinstance(loaded, dict):
        raise invalid(f"has a {type(loaded).__name__} in {path.name} instead of a dictionary of tensors", file=path)
    return loaded


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
    groups = {names[0]: len(names) for names in aliases(values)}
    shared = {name for names in aliases(values) for name in names[1:]}
    every = {name: value.numel() * value.element_size() for name, value in values.items()}
    distinct = sum(nbytes for name, nbytes in every.items() if name not in shared)
    if distinct > size or sum(every.values()) > _MOST_TIMES_STORED * size:
        most = max(groups, key=lambda name: groups[name] * every[name], default=max(every, key=every.__getitem__))
        raise invalid(
            f"has {format_size(sum(every.values()))} of tensors in {path.name}, a file of {format_size(size)}: they overlap, such as {most!r}",
            remedy="save each tensor as a copy of its own (tensor.clone()) in a safetensors file",
            tensor=most,
        )


def aliases(values: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """Return the names of tensors that are the same stored values, in groups."""
    groups: dict[object, list[str]] = {}
    for name, value in sorted(values.items()):
        if value.numel():
            key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            groups.setdefault(key, []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
