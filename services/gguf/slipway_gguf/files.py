"""Tell the files of an output apart: that of the text part, and the ``mmproj`` file for images beside it. Light."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from slipway_gguf.params import Level

_PROJECTOR = re.compile(r"(.+)-mmproj-(?:F32|F16|BF16)\.gguf")


def projector_name(name: str, level: Level) -> str:
    """Return the name of the ``mmproj`` file of a model."""
    return f"{name}-mmproj-{level.label}.gguf"


def is_projector(file: str, others: Iterable[str]) -> bool:
    """Return whether a file is the ``mmproj`` file beside one of the others; a model may be called ``mmproj`` itself."""
    match = _PROJECTOR.fullmatch(file)
    return match is not None and any(re.fullmatch(re.escape(match[1]) + r"-[^-]+\.gguf", other) for other in others)


def text_files(folder: Path, pattern: str = "*.gguf") -> list[Path]:
    """Return the GGUF files in a folder without those for images, sorted."""
    files = sorted(folder.glob(pattern))
    names = [each.name for each in files]
    return [each for each in files if not is_projector(each.name, names)]


def projector_files(folder: Path) -> list[Path]:
    """Return the ``mmproj`` files in a folder, sorted."""
    names = [each.name for each in sorted(folder.glob("*.gguf"))]
    return [folder / name for name in names if is_projector(name, names)]
