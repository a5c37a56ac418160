"""Choose the text for the comparison: the user's held-out text, or a built-in one that is part of every Python."""

from __future__ import annotations

import importlib.util
from codecs import getincrementaldecoder
from dataclasses import dataclass
from pathlib import Path

from slipway.counts import counted
from slipway.errors import ValidationError
from slipway.files.regular_file import open_regular

BUILT_IN_TOPICS = ("assignment", "classes", "exceptions", "formatstrings", "import", "operator-summary", "yield")
BUILT_IN_MODULES = ("argparse", "json.decoder", "textwrap", "zipfile")
_BETWEEN = "\n\n"
MAX_CHARACTERS = 4_000_000
"""Text beyond this is not used: there are few windows, and tokenizing all of it would only take time."""

_BYTES_PER_CHARACTER = 4
"""The most that UTF-8 takes."""


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """The text of a validation and its origin.

    Attributes:
        text: The whole text.
        source: Description of its origin.
        files: Names of the files, in order.
        held_out: Whether the user gave it as held-out text.
    """

    text: str
    source: str
    files: tuple[str, ...]
    held_out: bool


def held_out(folder: Path) -> HeldOutText:
    """Read the ``.txt`` files of a folder in order of name, joined by blank lines, up to MAX_CHARACTERS.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: there are none, or one is not UTF-8.
    """
    names: list[str] = []
    parts: list[str] = []
    room = MAX_CHARACTERS
    try:
        for path in sorted(folder.rglob("*.txt")):
            if room > 0:
                names.append(path.relative_to(folder).as_posix())
                parts.append(_beginning(path, room))
                room -= len(parts[-1]) + len(_BETWEEN)
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(
            f"held-out text cannot be read as UTF-8: {error}",
            reason="VALIDATION_IMPOSSIBLE",
            remedy="save the .txt files as UTF-8",
        ) from error
    if not any(part.strip() for part in parts):
        raise ValidationError(
            f"the held-out folder {folder.name!r} has no .txt file with text",
            reason="VALIDATION_IMPOSSIBLE",
            remedy="put text that the model was not trained on into .txt files there, or give no held-out text",
        )
    source = f"held-out text, {counted(len(names), 'file')}"
    return HeldOutText(_BETWEEN.join(parts), source, tuple(names), held_out=True)


def documentation() -> dict[str, str]:
    """Return Python's documentation by topic; empty for a Python without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return topics


def _beginning(path: Path, characters: int) -> str:
    """Read at most so many characters of a file.

    Raises:
        OSError: It cannot be read, or is not a regular file.
        UnicodeDecodeError: What is read is not UTF-8.
    """
    with open_regular(path) as file:
        data = file.read(characters * _BYTES_PER_CHARACTER)
        whole = not file.read(1)
    return getincrementaldecoder("utf-8")().decode(data, final=whole)[:characters]


def built_in() -> HeldOutText:
    """Return English from Python's documentation topics and code from its standard library: the same for a given Python."""
    topics = documentation()
    parts = [topics[name] for name in BUILT_IN_TOPICS if name in topics]
    names = [f"pydoc_data.topics[{name!r}]" for name in BUILT_IN_TOPICS if name in topics]
    for module in BUILT_IN_MODULES:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin and Path(spec.origin).is_file():
            parts.append(Path(spec.origin).read_text(encoding="utf-8"))
            names.append(module)
    source = (
        "built-in text (Python's documentation topics and standard library sources), because no held-out text was "
        "given: the model may have been trained on it, so its perplexity does not measure quality"
    )
    return HeldOutText(_BETWEEN.join(parts), source, tuple(names), held_out=False)
