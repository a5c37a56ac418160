"""Names of everything in a store, the same in a folder and in a bucket.

::

    blobs/sha256/aa/<digest>       the content of one file
    manifests/sha256/aa/<digest>   written last: an artifact exists from then on
    actions/aa/<key>.json          results by action key
"""

from __future__ import annotations

import re

from slipway.artifacts.digests import parse_digest

BLOBS = "blobs/sha256/"
MANIFESTS = "manifests/sha256/"
ACTIONS = "actions/"
_OWN_NAME = re.compile(
    rf"(?:(?:{BLOBS}|{MANIFESTS})([0-9a-f]{{2}})/\1[0-9a-f]{{62}}|{ACTIONS}([0-9a-f]{{2}})/\2[0-9a-f]{{62}}\.json)"
)


def is_name(name: str) -> bool:
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
