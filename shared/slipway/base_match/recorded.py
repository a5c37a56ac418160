"""Find the base model that an adapter names: in the Hugging Face cache, or in a folder near the run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.errors import ArtifactError, CheckpointValidationError
from slipway.files.json_documents import LARGEST, read_json
from slipway.files.paths import file_in, has_unknown_home, user_path
from slipway.model.model_files import CONFIG, cached_snapshot, is_cached

TRAINING_FOLDERS = 3
"""Number of parent folders of a checkpoint to search for a base model named by a relative path."""

_REPOSITORY = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
_SNAPSHOT = re.compile(r"/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/[0-9a-f]{40}$")
_CACHED = re.compile(r"models--[^/]+?--(?P<name>[^/]+)")  # a folder of the Hugging Face cache
_SEPARATORS = re.compile(r"[/\\]+")  # adapters are trained on Windows too
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Recorded:
    """The base model that an adapter names.

    Attributes:
        name: ``base_model_name_or_path``; empty if the adapter names none.
        revision: The repository's revision, if the adapter names one.
        folder: Its folder; None if it is not on this machine.
        guessed: Whether it was found only in the current folder, where another model may have the same name.
    """

    name: str
    revision: str = ""
    folder: Path | None = None
    guessed: bool = False

    @property
    def label(self) -> str:
        """Its name for people, quoted: a repository's id, or the last part of a path; never a whole path."""
        parts = [part for part in _SEPARATORS.split(self.name) if part]
        name = self.name if _REPOSITORY.fullmatch(self.name) else (parts or [""])[-1]
        return repr(name[:_SHOWN])


def recorded_base(checkpoint: Path, adapter_config: dict[str, Any], *, look: bool = True) -> Recorded:
    """Return the base model that ``adapter_config.json`` names, with its folder if it is on this machine. Download nothing.

    The first place with a model counts: the absolute path; the Hugging Face cache; the folders above the checkpoint, nearest first,
    where relative paths of a training usually start; the current folder. Without ``look`` no folder is searched: a worker's own
    folders have nothing to do with a user's adapter.
    """
    name, revision = adapter_config.get("base_model_name_or_path"), adapter_config.get("revision")
    if not isinstance(name, str) or not name:
        return Recorded("")
    revision = revision if isinstance(revision, str) else ""
    places = _places(name, revision, checkpoint) if look else ()
    base = next((folder for folder in places if _is_model(folder)), None)
    return Recorded(name, revision, base, guessed=base is not None and base == _path_here(name))


def _places(name: str, revision: str, checkpoint: Path) -> Iterator[Path]:
    if has_unknown_home(name):
        return
    path = user_path(name)
    if path.is_absolute():
        yield path
        return
    if _REPOSITORY.fullmatch(name) and is_cached(name):
        yield from _find_cached(name, revision)
    for folder in checkpoint.absolute().parents[:TRAINING_FOLDERS]:
        yield folder / path
    yield path.absolute()


def _path_here(name: str) -> Path | None:
    """Return the path of a relative name in the current folder."""
    path = Path(name)
    return None if path.is_absolute() or name.startswith("~") else path.absolute()


def _find_cached(name: str, revision: str) -> list[Path]:
    try:
        return [cached_snapshot(name, revision or None)]
    except (CheckpointValidationError, OSError, ValueError):  # not in the cache
        return []


def _is_model(folder: Path) -> bool:
    try:
        return file_in(folder, CONFIG) is not None
    except (ArtifactError, OSError, ValueError):  # for example a name that no file system allows
        return False


def repository_of(folder: Path) -> str:
    """Return the repository if a folder is its snapshot in the Hugging Face cache; empty for any other folder."""
    cached = _SNAPSHOT.search(folder.as_posix())
    return f"{cached['owner']}/{cached['name']}" if cached else ""


def last_part(name: str) -> str:
    """Return the last part of a path or repository name, in lower case for comparison."""
    cached = _CACHED.search(name)
    parts = [part for part in _SEPARATORS.split(name) if part not in ("", ".")]
    return (cached["name"] if cached else (parts or [""])[-1]).casefold()


def read_known_json(path: Path, *, largest: int = LARGEST) -> Any:
    """Read JSON from a regular file in its folder; return None if it is missing, too large or not JSON."""
    try:
        real = file_in(path.parent, path.name)
        return None if real is None else read_json(real, largest=largest, lenient=True)
    except (ArtifactError, OSError, ValueError):
        return None
