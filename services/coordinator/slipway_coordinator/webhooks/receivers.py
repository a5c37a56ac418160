"""The webhooks file: who is told of which events, and the secrets that sign what they are sent.

::

    source: https://slipway.example.org      # of all events; optional
    receivers:
      - name: portal
        url: https://portal.example.org/hooks/slipway
        secret_file: portal.secret           # whsec_…, one a line; relative to this file
        projects: [research]                 # all by default
        events: [export.succeeded, export.failed]   # all by default
"""

from __future__ import annotations

import base64
import binascii
import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from slipway.errors import ConfigurationError
from slipway.files.regular_file import check_regular, read_regular
from slipway.files.yaml_files import YamlError, load_document
from slipway.security.access.grants import PROJECT
from slipway.security.access.principals import ALL_PROJECTS
from slipway.security.outgoing import check_address
from slipway.security.reloading import Signature, signature
from slipway.texts import hidden_character
from slipway_coordinator.webhooks.cloud_events import EventType

log = logging.getLogger("slipway.coordinator.webhooks")

MOST_RECEIVERS = 16
_SECRET_PREFIX = "whsec_"  # noqa: S105 - what every secret begins with
_SECRET_BYTES = range(24, 65)
"""As Standard Webhooks says."""
_MOST_SECRETS = 4
_LARGEST_SECRET_FILE = 4 << 10
_MOST_PROBLEMS = 20

_Text = Annotated[str, StringConstraints(min_length=1, max_length=2048, strict=True)]


class Entry(BaseModel):
    """One receiver in the file.

    Attributes:
        name: In logs and metrics; deliveries belong to it, so a receiver that gets another name loses those that wait.
        url: Where events are sent: HTTPS, or plain HTTP on this machine.
        allow_http: Whether the address may be plain HTTP on any machine, where others can read the events.
        secret_file: Secrets of signatures, one a line. Each signs, so that a receiver can change from one to the next.
        ca_file: Authorities of the receiver's certificate; the system's by default.
        projects: Projects whose exports it is told of.
        events: Types of the events that it is told.
        timeout_seconds: How long an attempt may take.
        keep_hours: How long an event that does not arrive is tried again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?$")
    url: _Text
    allow_http: bool = False
    secret_file: Path
    ca_file: Path | None = None
    projects: frozenset[str] = Field(default=frozenset({ALL_PROJECTS}), min_length=1, max_length=1000)
    events: frozenset[EventType] = Field(default=frozenset(EventType), min_length=1)
    timeout_seconds: float = Field(default=15.0, ge=1.0, le=60.0)
    keep_hours: float = Field(default=72.0, ge=1.0, le=720.0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_address(self.url, what=f"{self.name}: url", allow_http=self.allow_http)
        if not self.url.isascii():
            raise ValueError(f"{self.name}: url is ASCII: percent-encode its path, and write its host in punycode")
        for project in sorted(self.projects):
            if project != ALL_PROJECTS and not PROJECT.fullmatch(project):
                raise ValueError(f"{self.name}: {project!r} is not the name of a project")
        return self

    def is_told(self, event: str, project: str) -> bool:
        """Return whether it is told of an event, by its :class:`EventType`, of a project's export."""
        return event in self.events and bool(self.projects & {ALL_PROJECTS, project})


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    source: _Text = "/slipway"
    receivers: tuple[Entry, ...] = Field(max_length=MOST_RECEIVERS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if hidden_character(self.source) or " " in self.source or not self.source.isascii():
            raise ValueError("source is a URI: ASCII, without spaces")
        names = [entry.name for entry in self.receivers]
        for name in sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two receivers have the name {name}")
        return self


@dataclass(frozen=True)
class Receiver:
    """A receiver with what its files hold."""

    entry: Entry
    secrets: tuple[str, ...] = field(repr=False)
    tls: ssl.SSLContext = field(repr=False)

    @property
    def name(self) -> str:
        """Its name."""
        return self.entry.name


@dataclass(frozen=True)
class Webhooks:
    """All receivers, the source of their events, and the files that were read, as they were before.

    Without arguments, there are none: what waits belongs to receivers that there are no more.
    """

    source: str = ""
    receivers: tuple[Receiver, ...] = ()
    files: tuple[Path, ...] = ()
    states: Signature = field(default=(), repr=False)


def load_webhooks(path: Path) -> Webhooks:
    """Read a webhooks file and the files it names.

    Raises:
        ConfigurationError: reason ``WEBHOOKS_INVALID``, with all problems; it quotes nothing of a secret or an address.
    """
    states = signature([path])
    try:
        file = _File.model_validate(load_document(path))
    except OSError as error:
        raise _invalid_error(path, [error.strerror or "it cannot be read"]) from None
    except ValidationError as error:
        raise _invalid_error(path, _problems_of(error)) from None
    except YamlError as error:
        raise _invalid_error(path, [str(error)]) from None
    named = [
        path.parent / each for one in file.receivers for each in (one.secret_file, one.ca_file) if each is not None
    ]
    states += signature(named)
    receivers, problems, contexts = list[Receiver](), list[str](), dict[Path | None, ssl.SSLContext]()
    for entry in file.receivers:
        try:
            receivers.append(_read_files(entry, path.parent, contexts))
        except ValueError as error:
            problems += [f"{entry.name}: {problem}" for problem in error.args]
    if problems:
        raise _invalid_error(path, problems)
    return Webhooks(file.source, tuple(receivers), (path, *named), states)


class WebhooksFile:
    """A webhooks file that is read again when it, or a file it names, changes. Safe for several threads.

    Raises:
        ConfigurationError: reason ``WEBHOOKS_INVALID`` if it cannot be used at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._current = load_webhooks(path)
        self._problem = ""

    def current(self) -> Webhooks:
        """Return what the files said last that could be used. It reads none of them: transactions of changes wait for it."""
        return self._current

    def refresh(self) -> None:
        """Read the files if they have changed. What cannot be used is logged, and read anew at the next call: a file may be still to come."""
        before = self._current
        if signature(before.files) == before.states:
            self._problem = ""
            return
        try:
            self._current = load_webhooks(self._path)
        except ConfigurationError as error:
            if error.message != self._problem:
                log.error(f"the files loaded before stay in use: {error}")
            self._problem = error.message
        else:
            self._problem = ""
            log.info(f"loaded again: {self._path} and the files it names")


class NoWebhooks:
    """In place of a file: no receivers."""

    def current(self) -> Webhooks:
        """As :meth:`WebhooksFile.current`."""
        return Webhooks()

    def refresh(self) -> None:
        """As :meth:`WebhooksFile.refresh`."""


def _read_files(entry: Entry, folder: Path, contexts: dict[Path | None, ssl.SSLContext]) -> Receiver:
    """Read the secrets and authorities of a receiver.

    Args:
        entry: The receiver.
        folder: Paths are relative to it.
        contexts: Those made before, by the file of their authorities: the system's take many milliseconds to read.

    Raises:
        ValueError: Each of its arguments is a problem.
    """
    problems, secrets, tls = list[str](), tuple[str, ...](), contexts.get(entry.ca_file)
    try:
        secrets = read_secrets(folder / entry.secret_file)
    except ValueError as error:
        problems.append(f"secret_file {error}")
    try:
        if tls is None:
            tls = contexts[entry.ca_file] = _context(None if entry.ca_file is None else folder / entry.ca_file)
    except OSError as error:  # ssl.SSLError is one
        problems.append(f"ca_file has no certificates that can be used: {error.strerror or 'it cannot be read'}")
    if tls is None or problems:
        raise ValueError(*problems)
    return Receiver(entry, secrets, tls)


def _context(authorities: Path | None) -> ssl.SSLContext:
    if authorities is not None:
        check_regular(authorities)
    return ssl.create_default_context(cafile=None if authorities is None else str(authorities))


def read_secrets(path: Path) -> tuple[str, ...]:
    """Return the secrets in a file, one a line.

    Raises:
        ValueError: The file has none, or one that Standard Webhooks does not allow. The message quotes nothing of it.
    """
    try:
        text = read_regular(path, largest=_LARGEST_SECRET_FILE).decode("ascii")
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("is not text") from None
    secrets = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not secrets or len(secrets) > _MOST_SECRETS:
        raise ValueError(f"has {len(secrets)} secrets; it takes 1 to {_MOST_SECRETS}, one a line")
    if not all(_is_secret(secret) for secret in secrets):
        raise ValueError("takes whsec_ and the base64 of 24 to 64 random bytes, one a line")
    return secrets


def _is_secret(text: str) -> bool:
    try:
        key = base64.b64decode(text.removeprefix(_SECRET_PREFIX), validate=True)
    except binascii.Error:
        return False
    return text.startswith(_SECRET_PREFIX) and len(key) in _SECRET_BYTES


def _problems_of(error: ValidationError) -> list[str]:
    return [
        (".".join(map(str, details["loc"])) or "the document") + ": " + details["msg"].removeprefix("Value error, ")
        for details in error.errors(include_input=False, include_url=False)[:_MOST_PROBLEMS]
    ]


def _invalid_error(path: Path, problems: list[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{path}: {'; '.join(problems)}",
        reason="WEBHOOKS_INVALID",
        remedy="see docs/operations.md#webhooks",
        about={"file": path},
    )
