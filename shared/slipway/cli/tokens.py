"""``slipway token``: make a token and its entry for the access file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipway.cli.options import Debug, Json, examples
from slipway.security.access.principals import Role

EXAMPLES = examples(
    "slipway token --name ci --role submitter --project research --token-file ci.token",
    "slipway token --name workers --role worker --token-file workers.token",
)


def token(  # noqa: PLR0917 - typer calls it by name
    name: Annotated[str, typer.Option("--name", help="Name of the principal, for logs.")],
    role: Annotated[Role, typer.Option("--role", help="What it may do.")],
    token_file: Annotated[
        Path, typer.Option("--token-file", metavar="FILE", help="New file that receives the token (mode 0600).")
    ],
    project: Annotated[
        list[str] | None, typer.Option("--project", help="May be given several times; '*' for all.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Make a token, and print its entry for the access file of a coordinator or worker."""
    from slipway.cli.terminal.console import print_answer
    from slipway.security.access.issuing import as_yaml, issue_token

    entry = issue_token(token_file, name=name, role=role.value, projects=project or [])
    print_answer(entry, as_yaml(entry), as_json=as_json)
