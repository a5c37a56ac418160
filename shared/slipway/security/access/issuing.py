"""Issue tokens: write each to a file that only its owner can read, and make its entry for the access file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipway.errors import ConfigurationError
from slipway.security.access.access_file import Entry
from slipway.security.access.tokens import new_token, token_hash


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
