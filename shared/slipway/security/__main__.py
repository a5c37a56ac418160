"""``python -m slipway.security --name NAME --role ROLE``: a new token, and its entry for the access file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

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
    try:
        # Private from the start, and never over a token that somebody uses.
        descriptor = os.open(arguments.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(token + "\n")
    except OSError as error:
        print(f"{arguments.token_file}: {error.strerror}", file=sys.stderr)
        return 3
    print(f"  - name: {arguments.name}\n    role: {arguments.role}")
    if arguments.project:
        names = ", ".join(f'"{name}"' for name in arguments.project)
        print(f"    projects: [{names}]")
    print(f"    token_sha256: {token_hash(token)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
