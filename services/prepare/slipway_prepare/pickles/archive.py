"""Checks of a zip archive of pickled weights before torch reads it.

torch refuses pickles that could run code. It does not refuse those that take too much memory: a member that grows a thousandfold when
unpacked, ``bytearray(10**10)``, or a tensor with one stored value and a shape of ten billion. torch itself stores members uncompressed.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from pathlib import Path

from slipway.files.regular_file import open_regular
from slipway_prepare.faults import invalid, unsafe

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
                raise unsafe(path, "has something after its end")
            with zipfile.ZipFile(file) as opened:
                _check_members(path, opened, size)
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, IndexError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise invalid(f"has an unreadable file {path.name} ({said})", file=path) from error


def _check_members(path: Path, archive: zipfile.ZipFile, size: int) -> None:
    members = archive.infolist()
    if len(members) > 2 * _MOST_TENSORS:
        raise unsafe(path, f"has {len(members)} members")
    packed = next((member for member in members if member.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise unsafe(path, f"has the compressed member {packed.filename[:100]!r}, which torch never writes")
    if sum(member.file_size for member in members) > size:
        raise unsafe(path, "has members that overlap")
    for member in members:
        if member.filename.endswith(".pkl"):
            if member.file_size > _LARGEST_PICKLE:
                raise unsafe(path, f"has {member.file_size} bytes of instructions, at most {_LARGEST_PICKLE} are read")
            _check_instructions(path, archive.read(member))


def _check_instructions(path: Path, data: bytes) -> None:
    for number, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        if number >= _MOST_INSTRUCTIONS:
            raise unsafe(path, f"has more than {_MOST_INSTRUCTIONS} instructions")
        if instruction.name == "GLOBAL" and not _NAMES.fullmatch(str(argument)):
            raise unsafe(path, f"names {str(argument)[:100]!r}, which tensors do not need and which could run code")
