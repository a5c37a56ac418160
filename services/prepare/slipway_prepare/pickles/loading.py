"""Read a file of pickled weights without running anything: mapped into memory, whatever its format.

torch refuses pickles that could run code, but not those that take too much memory: a member that grows a thousandfold when
unpacked, ``bytearray(10**10)``, or a tensor with one stored value and a shape of ten billion. So archives are checked first;
torch itself stores members uncompressed.

Torch's format from before 1.6 is a row of pickles with the tensors' bytes behind them. It cannot be mapped, and its pickles
cannot be checked before torch reads them, so it is rewritten in today's format in a process whose memory and time are bounded.
"""

from __future__ import annotations

import json
import pickle
import pickletools
import re
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from slipway.files.regular_file import open_regular
from slipway.machine.processes import python_module
from slipway.model.safetensors_file import METADATA
from slipway.sizes import format_size
from slipway_prepare.faults import code_error, disk_full_error, invalid_error, unsafe_error

_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is no text."""
_MOST_TIMES_STORED = 4
"""How large tensors may be together, as a multiple of their file: T5 has its embedding under four names."""
#: Errors that torch's restricted unpickler raises on damaged bytes; for code it raises ``UnpicklingError``.
_DAMAGED = (
    RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError, AssertionError, OverflowError, struct.error,
)  # fmt: skip

_MOST_TENSORS = 1 << 17
"""Most tensors in one file; models with more experts than that are stored as safetensors."""
_LARGEST_PICKLE = 16 << 20
"""Most bytes of pickle instructions; a tensor takes about 150."""
_MOST_INSTRUCTIONS = 32 * _MOST_TENSORS
_END = b"PK\x05\x06"
_END_BYTES = 22
#: Globals that a pickle of tensors names (``torch.save`` of a state dict); torch decides which of them are safe.
_NAMES = re.compile(
    r"collections OrderedDict|torch (\w+Storage|Size|device|[a-z]+\d\w*|bool)|torch\.storage \w+Storage|torch\._utils _rebuild_\w+|"
    r"torch\._tensor _rebuild_from_type_v2|torch\.nn\.parameter Parameter|torch\.serialization _get_layout"
)

_MAGIC = re.compile(rb"\x80[\x02\x03]\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.")
"""What a file from before torch 1.6 begins with: torch's magic number, pickled."""
_HEAD = 512
_TAR = (257, b"ustar")
_SECONDS, _BYTES_PER_SECOND = 120.0, 5e6
"""Time until the process that rewrites such a file is ended: far more than a slow disk needs."""


def load_pickle(path: Path, scratch: Path) -> dict[object, object]:
    """Unpickle a file of weights, mapped into memory, without running anything.

    Only ``torch.load(weights_only=True, mmap=True)`` is used, which takes the zip format that torch writes since 1.6. An older file
    is written in that format first, by a process of its own.

    Args:
        path: The file.
        scratch: Folder for an older file's copy in the newer format. It is removed at once; its space is freed with the tensors.

    Raises:
        CheckpointValidationError: ``UNSAFE_PICKLE`` or ``BASE_MODEL_INVALID``.
    """
    if zipfile.is_zipfile(path):
        return _load_archive(path, path)
    if not is_legacy(path):
        raise invalid_error(f"has a file {path.name} that is damaged, or no file that torch saves", file=path)
    with as_archive(path, scratch) as archive:
        return _load_archive(archive, path)


def _load_archive(archive: Path, path: Path) -> dict[object, object]:
    """Load an archive that is, or was made of, the file at ``path``."""
    check_archive(archive, path)
    try:
        loaded = torch.load(archive, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise code_error(path, str(error)) from error
    except _DAMAGED as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise invalid_error(f"has an unreadable file {path.name} ({said})", file=path) from error
    if not isinstance(loaded, dict):
        raise invalid_error(
            f"has a {type(loaded).__name__} in {path.name} instead of a dictionary of tensors", file=path
        )
    return loaded


def check_tensors(loaded: Mapping[object, object], path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle's dictionary.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` for a value that is no tensor, or cannot be read from the file as it is.
    """
    size, tensors = path.stat().st_size, dict[str, Tensor]()
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise invalid_error(f"has {name!r} in {path.name}, a {type(value).__name__} instead of a tensor", file=path)
        if name == METADATA or _HALF.search(name):
            raise invalid_error(
                f"has a tensor named {name!a} in {path.name}, which a safetensors file cannot hold",
                remedy="save it again with other names",
                tensor=ascii(name),
            )
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise invalid_error(f"has tensor {name!r} in {path.name} in a layout that cannot be read", tensor=name)
        if value.numel() * value.element_size() > size:  # strides of zero repeat stored values
            raise invalid_error(f"has tensor {name!r} in {path.name}, which is larger than the file", tensor=name)
        tensors[name] = value
    _check_sizes(tensors, path, size)
    return tensors


def _check_sizes(values: Mapping[str, Tensor], path: Path, size: int) -> None:
    """Refuse tensors that overlap so that together they exceed their file, or with all their names ``_MOST_TIMES_STORED`` times the file."""
    groups = {names[0]: len(names) for names in aliases(values)}
    shared = {name for names in aliases(values) for name in names[1:]}
    every = {name: value.numel() * value.element_size() for name, value in values.items()}
    distinct = sum(nbytes for name, nbytes in every.items() if name not in shared)
    if distinct > size or sum(every.values()) > _MOST_TIMES_STORED * size:
        most = max(groups, key=lambda name: groups[name] * every[name], default=max(every, key=every.__getitem__))
        raise invalid_error(
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


def check_archive(archive: Path, path: Path) -> None:
    """Make sure that reading an archive takes no more memory than its file has bytes, and no more time than its tensors need.

    Args:
        archive: The archive.
        path: The file to name in errors, which it is or was made of.

    Raises:
        CheckpointValidationError: ``UNSAFE_PICKLE`` for contents that tensors do not need, ``BASE_MODEL_INVALID`` for a damaged archive.
    """
    try:
        with open_regular(archive) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _END_BYTES))
            if not file.read(_END_BYTES).startswith(_END):  # two readers could see two different archives in it
                raise unsafe_error(path, "has something after its end")
            with zipfile.ZipFile(file) as opened:
                _check_members(path, opened, size)
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, IndexError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise invalid_error(f"has an unreadable file {path.name} ({said})", file=path) from error


def _check_members(path: Path, archive: zipfile.ZipFile, size: int) -> None:
    members = archive.infolist()
    if len(members) > 2 * _MOST_TENSORS:
        raise unsafe_error(path, f"has {len(members)} members")
    packed = next((member for member in members if member.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise unsafe_error(path, f"has the compressed member {packed.filename[:100]!r}, which torch never writes")
    if sum(member.file_size for member in members) > size:
        raise unsafe_error(path, "has members that overlap")
    for member in members:
        if member.filename.endswith(".pkl"):
            if member.file_size > _LARGEST_PICKLE:
                raise unsafe_error(
                    path, f"has {member.file_size} bytes of instructions, at most {_LARGEST_PICKLE} are read"
                )
            _check_instructions(path, archive.read(member))


def _check_instructions(path: Path, data: bytes) -> None:
    for number, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        if number >= _MOST_INSTRUCTIONS:
            raise unsafe_error(path, f"has more than {_MOST_INSTRUCTIONS} instructions")
        if instruction.name == "GLOBAL" and not _NAMES.fullmatch(str(argument)):
            raise unsafe_error(
                path, f"names {str(argument)[:100]!r}, which tensors do not need and which could run code"
            )


def is_legacy(path: Path) -> bool:
    """Return whether a file has torch's format from before 1.6.

    Raises:
        CheckpointValidationError: ``UNSAFE_PICKLE``: it has the still older one, which torch does not read without running code.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    place, mark = _TAR
    if head[place:].startswith(mark):
        raise unsafe_error(
            path, "is a tar archive, as torch wrote before version 0.1.10, which is read only by running code"
        )
    return _MAGIC.match(head) is not None


@contextmanager
def as_archive(path: Path, scratch: Path) -> Iterator[Path]:
    """Yield a file in today's format with the content of an older one; remove it afterwards.

    Args:
        path: The older file.
        scratch: Folder for the newer one.

    Raises:
        CheckpointValidationError: ``UNSAFE_PICKLE``: it would run code, or takes more memory or time than its size allows;
            ``BASE_MODEL_INVALID``: it is damaged; ``DISK_FULL``.
    """
    with tempfile.TemporaryDirectory(dir=scratch, prefix="pickle-") as folder:
        target = Path(folder) / "weights.bin"
        failure = _rewrite(path, target)
        if failure is not None:
            raise failure
        yield target


def _rewrite(path: Path, target: Path) -> Exception | None:
    command = python_module("slipway_prepare.pickles.rewriting", str(path.absolute()), str(target.absolute()))
    patience = _SECONDS + path.stat().st_size / _BYTES_PER_SECOND
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience, cwd=target.parent, check=False
        )
    except subprocess.TimeoutExpired:
        return unsafe_error(path, f"takes more than {patience:.0f} seconds to read")
    try:
        said = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = {"fault": "ended"}
    return _failure(path, fault=str(said.get("fault", "")), detail=str(said.get("detail", "")), code=done.returncode)


def _failure(path: Path, *, fault: str, detail: str, code: int) -> Exception | None:
    match fault:
        case "":
            return None
        case "code":
            return code_error(path, detail)
        case "damaged":
            return invalid_error(f"has an unreadable file {path.name} ({detail})", file=path)
        case "disk":
            return disk_full_error(path)
        case "memory":
            return unsafe_error(path, "needs far more memory than its size")
    # A signal of the kernel: the time of the process is over, or its memory.
    return unsafe_error(path, f"needs more time or memory than its size allows (its process ended with {code})")
