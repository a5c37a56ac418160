"""SHA-256 digests, and the names that they give to everything in a store, the same in a folder and in a bucket.

Digests are written ``sha256:<64 hexadecimal digits>``, as in the OCI image specification. The names::

    blobs/sha256/aa/<digest>       the content of one file
    manifests/sha256/aa/<digest>   written last: an artifact exists from then on
    actions/aa/<key>.json          results by action key
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import BinaryIO

from slipway.errors import ArtifactError

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_CHUNK_BYTES = 4 << 20

BLOBS = "blobs/sha256/"
MANIFESTS = "manifests/sha256/"
ACTIONS = "actions/"
_OWN_NAME = re.compile(
    rf"(?:(?:{BLOBS}|{MANIFESTS})([0-9a-f]{{2}})/\1[0-9a-f]{{62}}|{ACTIONS}([0-9a-f]{{2}})/\2[0-9a-f]{{62}}\.json)"
)


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


def abridged(digest: str) -> int:
    """Return the first eight bytes of a digest as a number, for long lists in which a rare confusion does no harm."""
    return int(parse_digest(digest)[:16], 16)


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


def is_store_name(name: str) -> bool:
    """Return whether a name is one that a store gives. Files with other names are not the store's and are never touched."""
    return _OWN_NAME.fullmatch(name) is not None


def blob_name(digest: str) -> str:
    """Return the name of a blob."""
    return _name(BLOBS, parse_digest(digest))


def manifest_name(digest: str) -> str:
    """Return the name of an artifact's manifest."""
    return _name(MANIFESTS, parse_digest(digest))


def action_name(key: str) -> str:
    """Return the name of an action's result."""
    return f"{_name(ACTIONS, parse_digest(f'sha256:{key}'))}.json"


def digest_of(name: str) -> str:
    """Return the digest in the name of a blob or manifest."""
    return f"sha256:{name.rpartition('/')[2]}"


def key_of(name: str) -> str:
    """Return the action key in the name of a result."""
    return name.rpartition("/")[2].removesuffix(".json")


def _name(folder: str, text: str) -> str:
    return f"{folder}{text[:2]}/{text}"
