"""Roles, principals with their projects, and bearer tokens.

Tokens are random, stored as hashes, and compared in constant time. What that takes is imported where it is used, because ``slipway --help``
needs the roles alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

ALL_PROJECTS = "*"

TOKEN_PREFIX = "slipway_"  # noqa: S105 - it is no secret
"""Lets secret scanners recognise a leaked token."""

MOST_TOKEN_BYTES = 8192
"""Longest token: those of issuers hold groups and more."""

_TOKEN = re.compile(rf"[\x21-\x7e]{{16,{MOST_TOKEN_BYTES}}}")
_HASH = re.compile(r"[0-9a-f]{64}")


class Role(StrEnum):
    """Role of a principal. ``SUBMITTER`` includes ``VIEWER``, ``OPERATOR`` includes both; ``WORKER`` is separate."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    WORKER = "worker"


VIEWERS = frozenset({Role.VIEWER, Role.SUBMITTER, Role.OPERATOR})
SUBMITTERS = frozenset({Role.SUBMITTER, Role.OPERATOR})
OPERATORS = frozenset({Role.OPERATOR})
WORKERS = frozenset({Role.WORKER})
EVERYBODY = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Principal:
    """An identified caller.

    Attributes:
        name: Name for logs.
        roles: Its roles; several only for the owner of a private coordinator.
        projects: Projects it may see and change; ``*`` for all.
        holds_store: It has credentials of the artifact store, so it can read any artifact whose digest it knows.
        issuer: The issuer of its token; empty for a principal of the access file.
        subject: Its subject there.
    """

    name: str
    roles: frozenset[Role]
    projects: frozenset[str] = frozenset()
    holds_store: bool = False
    issuer: str = ""
    subject: str = ""

    @property
    def may_name_any(self) -> bool:
        """Whether it may use every artifact whose digest it knows, of any project."""
        return self.holds_store or ALL_PROJECTS in self.projects

    def may_see(self, project: str) -> bool:
        """Return whether this principal may see a project."""
        return ALL_PROJECTS in self.projects or project in self.projects


OWNER = Principal("owner", EVERYBODY, frozenset({ALL_PROJECTS}))
"""The caller of a server that only its own machine or user can reach."""


def new_token() -> str:
    """Return a token of 256 random bits. Its entropy is why one round of SHA-256 is enough to store it."""
    import secrets

    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """Return the hash that is stored for a token."""
    import hashlib

    return hashlib.sha256(token.encode()).hexdigest()


def is_hash(text: str) -> bool:
    """Return whether a text can be a :func:`token_hash`."""
    return _HASH.fullmatch(text) is not None


def is_token(text: str) -> bool:
    """Return whether a text can travel as a token: printable, without spaces."""
    return _TOKEN.fullmatch(text) is not None


def match_hashes(token: str, hashes: Iterable[str]) -> list[bool]:
    """Return for each hash whether it is the token's, in a time that does not depend on the match."""
    import hmac

    presented = token_hash(token)
    return [hmac.compare_digest(presented, stored) for stored in hashes]
