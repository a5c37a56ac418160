"""The manifest of an artifact: every file's path, size, digest and media type, in one canonical JSON document."""

from __future__ import annotations

import json
import mimetypes
import os
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from slipway.artifacts.digests import digest_bytes, digest_file, parse_digest
from slipway.artifacts.faults import changed_error, unreadable_error
from slipway.errors import ArtifactError
from slipway.files.json_documents import parse_json
from slipway.formats.registry import formats
from slipway.texts import quoted

MANIFEST_VERSION = 1
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_DEPTH = 64
_SHOWN = 100
_LARGEST_SIZE = (1 << 63) - 1
_MOST_VALUES = 1 << 23
"""Limit of values in a manifest's JSON; no artifact has that many files."""
_DRIVE = re.compile(r"[A-Za-z]:")
_MEDIA_TYPES = {
    ".safetensors": "application/vnd.safetensors",
    ".jinja": "text/x-jinja",
    ".md": "text/markdown",
}


@dataclass(frozen=True, slots=True, order=True)
class ManifestFile:
    """One file of an artifact. ``path`` is relative with forward slashes, and never leaves the artifact."""

    path: str
    size_bytes: int
    digest: str
    media_type: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of one artifact, sorted by path."""

    files: tuple[ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def distinct_bytes(self) -> int:
        """Return the bytes of all files; files with the same content are stored, and count, once."""
        return sum({file.digest: file.size_bytes for file in self.files}.values())

    @property
    def digest(self) -> str:
        """Return the digest of this manifest, which is the artifact's name."""
        return digest_bytes(self.to_bytes())

    def without(self, names: Collection[str]) -> tuple[ManifestFile, ...]:
        """Return the files whose paths match none of these patterns."""
        return tuple(file for file in self.files if not matches(file.path, names))

    def to_bytes(self) -> bytes:
        """Return canonical JSON: the same files always give the same bytes."""
        document = {"version": MANIFEST_VERSION, "files": [asdict(file) for file in self.files]}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def of(cls, files: Iterable[ManifestFile]) -> Manifest:
        """Make a manifest of files in any order.

        Raises:
            ArtifactError: reason ``ARTIFACT_INVALID`` if a path is unsafe, if two paths are equal (also when compared without case),
                or if one digest has two sizes.
        """
        ordered = tuple(sorted(files))
        sizes = {file.digest: file.size_bytes for file in ordered}
        for file in ordered:
            check_path(file.path)
            parse_digest(file.digest)
            if not 0 <= file.size_bytes <= _LARGEST_SIZE:
                raise _invalid_error(f"{file.path!r} has a size of {file.size_bytes}", file.path)
            if file.size_bytes != sizes[file.digest]:
                raise _invalid_error(f"{file.path!r} has the digest of a file of another size", file.path)
        if sum(file.size_bytes for file in ordered) > _LARGEST_SIZE:
            raise _invalid_error(f"its files have more than {_LARGEST_SIZE} bytes together", "")
        _check_apart(file.path for file in ordered)
        return cls(ordered)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read and check the manifest that :meth:`to_bytes` wrote.

        Raises:
            ArtifactError: reason ``ARTIFACT_INVALID`` if it is not a manifest, or one that could write outside its folder.
        """
        try:
            document = parse_json(data, most_values=_MOST_VALUES)
            if document["version"] != MANIFEST_VERSION:
                raise _invalid_error(f"manifest version {quoted(document['version'])} is not known", "")
            return cls.of([_entry(file) for file in document["files"]])
        except (ValueError, KeyError, TypeError) as error:
            raise _invalid_error(f"not a manifest: {error}", "") from error


def matches(path: str, names: Collection[str]) -> bool:
    """Return whether a path matches one of some patterns."""
    return any(fnmatchcase(path, pattern) for pattern in names)


def _entry(file: Any) -> ManifestFile:
    texts = [file[key] for key in ("path", "digest", "media_type")]
    size = file["size_bytes"]
    if not all(isinstance(text, str) for text in texts) or not isinstance(size, int) or isinstance(size, bool):
        raise ValueError("the entry of a file is not {path, size_bytes, digest, media_type}")
    return ManifestFile(path=texts[0], size_bytes=size, digest=texts[1], media_type=texts[2])


def describe_file(
    name: str, file: BinaryIO, *, known: str | None = None, on_bytes: Callable[[int], None] | None = None
) -> ManifestFile:
    """Return the manifest entry of an open file.

    Args:
        name: Path inside the artifact.
        file: The file, unbuffered.
        known: Its digest if known; the file is not read then.
        on_bytes: Gets the size of each chunk read.

    Raises:
        ArtifactError: reason ``FILE_ERROR``, also when the file changes while it is read.
    """
    try:
        before = os.fstat(file.fileno())
        digest = digest_file(file, on_bytes=on_bytes) if known is None else known
        if known is not None and on_bytes is not None:
            on_bytes(before.st_size)
        after = os.fstat(file.fileno())
    except OSError as error:
        raise unreadable_error(file.name, error) from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise changed_error(file.name)
    return ManifestFile(path=name, size_bytes=before.st_size, digest=digest, media_type=media_type(name))


@cache
def _media_types() -> dict[str, str]:
    """Return media types by suffix, including those of the installed formats' files."""
    return {suffix: kind for each in formats().values() for suffix, kind in each.media_types.items()} | _MEDIA_TYPES


def media_type(path: str) -> str:
    """Return the media type of a file by its name."""
    suffix = PurePosixPath(path).suffix.lower()
    return _media_types().get(suffix) or mimetypes.guess_type(path, strict=True)[0] or "application/octet-stream"


_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of control characters, invisible characters, halves of surrogate pairs and line ends."""


def check_path(path: str) -> None:
    """Refuse a path that is not a plain relative path.

    Raises:
        ArtifactError: reason ``ARTIFACT_INVALID``.
    """
    parts = path.split("/")
    if (
        not path
        or "\\" in path
        or _DRIVE.match(path)
        or any(unicodedata.category(character) in _UNSAFE for character in path)
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise _invalid_error(f"{path[:_SHOWN]!r} is not a safe path inside an artifact", path)
    if len(parts) > MAX_DEPTH:
        raise _invalid_error(f"{path[:_SHOWN]!r}… is nested more than {MAX_DEPTH} folders deep", path)
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise _invalid_error(f"{path[:_SHOWN]!r}… is too long for a file system", path)


def _check_apart(paths: Iterable[str]) -> None:
    """Refuse paths that some file system takes for the same file, and paths that are a file and a folder at once."""
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for path in paths:
        plain = _plain(path)
        if plain in seen:
            raise _invalid_error(f"the path {path!r} {_describe_clash(seen[plain], path)}", path)
        seen[plain] = path
        folder = path.rpartition("/")[0]
        while folder and folders.get(plain := _plain(folder)) != folder:  # parents of a known folder are known
            if plain in folders:
                raise _invalid_error(f"the folder {folder!r} {_describe_clash(folders[plain], folder)}", path)
            folders[plain] = folder
            folder = folder.rpartition("/")[0]
    for plain in sorted(folders.keys() & seen.keys()):
        raise _invalid_error(f"{seen[plain]!r} is a file and a folder in a manifest", seen[plain])


def _plain(path: str) -> str:
    """Return a text that is equal for all paths that some file system takes for one (Unicode's canonical caseless matching)."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())


def _describe_clash(first: str, second: str) -> str:
    if first == second:
        return "appears twice in a manifest"
    return f"appears in a manifest beside {first!r}, which is the same name on some file systems"


def _invalid_error(message: str, path: str) -> ArtifactError:
    return ArtifactError(
        message,
        reason="ARTIFACT_INVALID",
        about={"path": path[:_SHOWN].encode(errors="replace").decode()} if path else None,
    )
