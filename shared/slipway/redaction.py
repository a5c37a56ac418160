"""Remove secrets from texts: values of secret-looking environment variables, and passwords in URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from urllib.parse import unquote

SECRET_NAMES = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(?:API|ACCESS|PRIVATE|SIGNING|ENCRYPTION)_?KEY|(?:^|_)(?:PAT|PWD|DSN|AUTH|COOKIE|HEADERS)$",
    re.IGNORECASE,
)
"""Names of environment variables whose values are secret."""

_NO_SECRETS = frozenset({"PWD"})
"""The current folder; ``MYSQL_PWD`` is a password."""

_URL_PASSWORD = re.compile(r'(?<=:/)(/?[^\s/@:"]{0,512}):(?!\d{1,5}/)([^\s"]{1,512})(?=@)')
"""User and password of a URL, also of one that was read as a path and so has lost a slash.

A password may hold ``/`` and ``@`` that are not escaped; a port with a path after it is no password.
"""


def redact_address(url: str) -> str:
    """Return a malformed address without its user and its query, which may be secret; a good one has neither."""
    scheme, slashes, rest = url.partition("//")
    place, mark, _ = rest.partition("?")
    before, at, host = place.rpartition("@")
    return f"{scheme}{slashes}{'…' if before else ''}{at}{host}{'?…' if mark else ''}"


def redact(text: str) -> str:
    """Return a text without the values of secret-looking environment variables, and without passwords of URLs."""
    for value in _secrets():
        text = text.replace(value, "***")
    return _URL_PASSWORD.sub(r"\1:***", text)


@cache
def _secrets() -> tuple[str, ...]:
    return secrets_of(os.environ)


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables with secret-looking names, and passwords in URLs; leave out short ones, which occur in ordinary text."""
    named = {value for name, value in environment.items() if SECRET_NAMES.search(name) and name not in _NO_SECRETS}
    passwords = {unquote(match[2]) for value in environment.values() for match in _URL_PASSWORD.finditer(value)}
    secrets = {value for value in named | passwords if len(value) >= 8}
    return tuple(sorted(secrets, key=len, reverse=True))
