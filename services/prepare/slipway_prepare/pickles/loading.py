"""Read a file of pickled weights without running anything: mapped into memory, whatever its format."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from slipway_prepare.faults import invalid, runs_code
from slipway_prepare.pickles.archive import check_archive
from slipway_prepare.pickles.legacy import as_archive, is_legacy

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
    size, found = path.stat().st_size, {}
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise invalid(f"has {name!r} in {path.name}, a {type(value).__name__} instead of a tensor", file=path)
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise invalid(f"has tensor {name!r} in {path.name} in a layout that cannot be read", tensor=name)
        if value.numel() * value.element_size() > size:  # strides of zero repeat stored values
            raise invalid(f"has tensor {name!r} in {path.name}, which is larger than the file", tensor=name)
        found[name] = value
    return found
