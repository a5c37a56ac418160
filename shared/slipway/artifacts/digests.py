"""SHA-256 digests of files, written ``sha256:<64 hexadecimal digits>`` as in the OCI image specification."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import BinaryIO

from slipway.errors import ArtifactError

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_CHUNK_BYTES = 4 << 20


def is_digest(text: str) -> bool:
    """Return whether a text is a SHA-256 digest."""
    return _DIGEST.fullmatch(text) is not None


def parse_digest(text: str) -> str:
    """Return the hexadecimal part of a digest.

    Raises:
        ArtifactError: reason ``ARTIFACT_INVALID`` if ``text`` is not a SHA-256 digest.
    """
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise ArtifactError(
            f"{text[:100]!r} is not a digest",
            reason="ARTIFACT_INVALID",
            remedy="digests are written sha256: and 64 hexadecimal digits",
            about={"digest": text[:100]},
        )
    return match.group(1)


def digest_bytes(data: bytes) -> str:
    """Return the digest of bytes in memory."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_file(file: BinaryIO, *, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the digest of an open, unbuffered file from its beginning; ``on_bytes`` gets the size of each chunk read."""
    sha = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    file.seek(0)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        sha.update(view[:count])
        if on_bytes is not None:
            on_bytes(count)
    return f"sha256:{sha.hexdigest()}"
