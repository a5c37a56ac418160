"""The access file (who may call, how each proves its identity, and what each may do), and new tokens with their entries.

Besides ``principals:`` it has :mod:`issuers <slipway.security.access.issuers.settings>`, whose tokens are accepted too, and
:mod:`projects <slipway.security.access.projects>`, with their limits.

::

    principals:
      - name: ci
        role: submitter                # viewer, submitter, operator or worker
        projects: [research]           # or ["*"]
        token_sha256: 5f2c…            # of a token that slipway token made
        expires: 2027-06-30            # optional: the token's last day (UTC)
        holds_store: true              # optional: it has the artifact store's credentials, too
      - name: workers
        role: worker
        certificate: workers.slipway   # DNS or URI name in the certificate it shows
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slipway.distribution import require
from slipway.errors import ConfigurationError
from slipway.files.yaml_files import LISTS, YamlError, YamlLimitError, load_document
from slipway.security.access.grants import Grant
from slipway.security.access.issuers.settings import Issuer
from slipway.security.access.issuers.tokens import Issuers, is_signed_token, names_taken
from slipway.security.access.principals import OWNER, Principal, Role, is_hash, match_hashes, new_token, token_hash
from slipway.security.access.projects import ALIKE, ProjectLimits, Projects, check_names
from slipway.security.access.refusals import unauthenticated_error
from slipway.security.reloading import Reloaded, describe_path
from slipway.texts import hidden_character

_MOST_ISSUERS = 16


class Entry(Grant):
    """One principal of the file."""

    name: str = Field(min_length=1, max_length=100)
    token_sha256: str = ""
    certificate: str = ""
    expires: date | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if hidden_character(self.name):
            raise ValueError(f"{self.name!r} has the character {hidden_character(self.name)}")
        if not self.token_sha256 and not self.certificate:
            raise ValueError(f"{self.name}: give token_sha256 or certificate")
        if self.token_sha256 and not is_hash(self.token_sha256):
            raise ValueError(f"{self.name}: token_sha256 takes 64 hex digits, never the token itself")
        self.check(self.name)
        if self.expires is not None and not self.token_sha256:
            raise ValueError(f"{self.name}: expires is of a token; a certificate has its own last day")
        return self

    def principal(self) -> Principal:
        """Return the principal of this entry."""
        return Principal(self.name, frozenset({Role(self.role)}), self.projects, self.holds_store)


class AccessList(BaseModel):
    """All principals of the file, the issuers of other callers' tokens, and the limits of projects."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    principals: tuple[Entry, ...] = ()
    issuers: tuple[Issuer, ...] = Field(default=(), max_length=_MOST_ISSUERS)
    projects: dict[str, ProjectLimits] = {}

    @model_validator(mode="after")
    def _check_unique(self) -> Self:
        if not self.principals and not self.issuers:
            raise ValueError("name at least one principal or issuer")
        for kind in ("name", "issuer"):
            if len({getattr(issuer, kind) for issuer in self.issuers}) != len(self.issuers):
                raise ValueError(f"two issuers have the same {kind}")
        for name in names_taken([entry.name for entry in self.principals], self.issuers):
            raise ValueError(f"{name!r} could be the name of an issuer's caller, too: choose another name")
        check_names(self.projects)
        for kind in ("name", "token_sha256", "certificate"):
            values = [value for entry in self.principals if (value := getattr(entry, kind))]
            if len(values) != len(set(values)):
                raise ValueError(f"two principals have the same {kind}")
        return self


def load_access(path: Path) -> AccessList:
    """Read an access file.

    Raises:
        ConfigurationError: reason ``ACCESS_INVALID``; the message quotes nothing from the file that could be a secret.
        ServiceError: reason ``UNSUPPORTED`` if it has issuers and the library for their tokens is not installed.
    """
    try:
        loaded = AccessList.model_validate(load_document(path, limits=LISTS))
    except OSError as error:
        raise _invalid_error(path, error.strerror or "it cannot be read") from None
    except ValidationError as error:
        problems = "; ".join(
            (".".join(map(str, details["loc"])) or "the document") + ": " + details["msg"].removeprefix("Value error, ")
            for details in error.errors(include_input=False, include_url=False)
        )
        raise _invalid_error(path, problems) from None
    except YamlLimitError as error:
        raise _invalid_error(path, str(error)) from None
    except YamlError as error:
        where = f"line {error.line}: " if error.line else ""
        raise _invalid_error(path, f"{where}not a YAML document") from None
    if loaded.issuers:
        require("oidc", what="issuers: in the access file")
    return loaded


class AccessFile:
    """Identifies callers by an access file that is read again when it changes.

    Raises:
        ConfigurationError: reason ``ACCESS_INVALID`` if the file cannot be used at the start.
    """

    def __init__(self, path: Path) -> None:
        self._list = Reloaded([path], lambda: load_access(path))
        self._issuers = Issuers()
        self._projects: tuple[AccessList | None, Projects] = (None, Projects())

    async def identify(self, *, token: str, certificate_names: Sequence[str]) -> Principal:
        """Identify the caller by its token or, without one, by its certificate.

        Raises:
            ServiceError: reason ``UNAUTHENTICATED``, or another one of :meth:`Issuers.identify`.
        """
        current = self._list.current()
        entries = current.principals
        if token:
            with_token = [entry for entry in entries if entry.token_sha256]
            matches = match_hashes(token, [entry.token_sha256 for entry in with_token])
            for entry, matched in zip(with_token, matches, strict=True):
                if matched:
                    return _check_expiry(entry).principal()
            if current.issuers and is_signed_token(token):
                self._issuers.use(current.issuers)
                return await self._issuers.identify(token)
            raise unauthenticated_error("the token is not known")
        for entry in entries:
            if entry.certificate and entry.certificate in certificate_names:
                return entry.principal()
        if certificate_names:
            raise unauthenticated_error(f"no principal has the certificate of {', '.join(certificate_names)}")
        raise unauthenticated_error("the call carries neither a token nor a certificate")

    def projects(self) -> Projects:
        """Return the limits of projects that the file has now. Safe from any thread."""
        current = self._list.current()
        known, projects = self._projects
        if known is not current:
            projects = Projects(current.projects)
            self._projects = (current, projects)
        return projects


class Everyone:
    """Identifies every caller as the owner, for a server only the owner can reach: a private socket, or loopback on an own machine."""

    async def identify(self, *, token: str, certificate_names: Sequence[str]) -> Principal:  # noqa: ARG002 - as AccessFile's
        """Return the owner."""
        return OWNER

    def projects(self) -> Projects:
        """Return no limits."""
        return ALIKE


class Nobody:
    """Refuses every caller, for a server on a network without an access file."""

    async def identify(self, *, token: str, certificate_names: Sequence[str]) -> Principal:  # noqa: ARG002 - as AccessFile's
        """Raise ``UNAUTHENTICATED``."""
        raise unauthenticated_error("this server was started without an access file")

    def projects(self) -> Projects:
        """Return no limits."""
        return ALIKE


def _check_expiry(entry: Entry) -> Entry:
    if entry.expires is not None and datetime.now(UTC).date() > entry.expires:
        raise unauthenticated_error(
            f"the token of {entry.name} expired on {entry.expires}",
            remedy="ask the keeper of the access file for a new token or a later date",
        )
    return entry


def _invalid_error(path: Path, what: str) -> ConfigurationError:
    name = describe_path(path, "access_file")
    return ConfigurationError(
        f"{name}: {what}", reason="ACCESS_INVALID", remedy="see docs/security.md", about={"file": name}
    )


def issue_token(path: Path, *, name: str, role: str, projects: Sequence[str]) -> dict[str, Any]:
    """Write a new token into a new file of mode 0600; return its entry of the access file.

    Raises:
        ConfigurationError: ``ACCESS_INVALID`` for an impossible principal, or a file that cannot be created.
    """
    token = new_token()
    entry = {"name": name, "role": role, "projects": list(projects), "token_sha256": token_hash(token)}
    try:
        Entry.model_validate(entry)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigurationError(message, reason="ACCESS_INVALID", about={"name": name}) from None
    try:
        # Private from the start, and never overwriting a token in use.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(token + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}", reason="ACCESS_INVALID", remedy="name a new file", about={"file": path}
        ) from error
    return {key: value for key, value in entry.items() if value}


def as_yaml(entry: dict[str, Any]) -> str:
    """Return an entry as text for an access file, below ``principals:``."""
    lines = [f"{key}: {json.dumps(value)}" for key, value in entry.items()]  # JSON is YAML, whatever is in a name
    return "\n".join(f"  {' ' if number else '-'} {line}" for number, line in enumerate(lines))
