"""Bearer tokens: random, stored as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

PREFIX = "slipway_"
"""Lets secret scanners recognise a leaked token."""

_TOKEN = re.compile(r"[\x21-\x7e]{16,512}")
_HASH = re.compile(r"[0-9a-f]{64}")


def new_token() -> str:
    """Return a token of 256 random bits. Its entropy is why one round of SHA-256 is enough to store it."""
    return PREFIX + secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """Return the hash that is stored for a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_hash(text: str) -> bool:
    """Return whether a text can be a :func:`token_hash`."""
    return _HASH.fullmatch(text) is not None


def is_token(text: str) -> bool:
    """Return whether a text can travel as a token: printable, without spaces."""
    return _TOKEN.fullmatch(text) is not None


def match_hashes(token: str, hashes: Iterable[str]) -> list[bool]:
    """Return for each hash whether it is the token's, in a time that does not depend on the match."""
    presented = token_hash(token)
    return [hmac.compare_digest(presented, stored) for stored in hashes]
