"""``python -m slipway.security --name NAME --role ROLE``: a new token, and its entry for the access file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from pydantic import ValidationError

from slipway.security.access_file import Entry
from slipway.security.flags import examples
from slipway.security.principals import Role
from slipway.security.tokens import new_token, token_hash


def main() -> int:
    """Write a new token into a file that only its owner can read; print the entry that lets it in."""
    parser = argparse.ArgumentParser(
        prog="python -m slipway.security",
        description="Makes a token, and prints its entry for the access file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=examples(
            "python -m slipway.security --name ci --role submitter --project research --token-file ci.token"
        ),
    )
    parser.add_argument("--name", required=True, help="of the principal, for logs")
    parser.add_argument("--role", required=True, choices=[role.value for role in Role])
    parser.add_argument("--project", action="append", default=[], help="may be given several times; '*' for all")
    parser.add_argument("--token-file", type=Path, required=True, help="new file that receives the token")
    arguments = parser.parse_args()
    token = new_token()
    entry = {"name": arguments.name, "role": arguments.role, "projects": arguments.project}
    entry |= {"token_sha256": token_hash(token)}
    try:
        Entry.model_validate(entry)
    except ValidationError as error:
        parser.error(error.errors(include_url=False)[0]["msg"].removeprefix("Value error, "))
    try:
        # Private from the start, and never over a token that somebody uses.
        descriptor = os.open(arguments.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(token + "\n")
    except OSError as error:
        print(f"{arguments.token_file}: {error.strerror}", file=sys.stderr)
        return 3
    for number, (key, value) in enumerate(entry.items()):
        if value:
            print(f"  {' ' if number else '-'} {key}: {json.dumps(value)}")  # JSON is YAML, whatever is in a name
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
