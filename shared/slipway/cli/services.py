"""``slipway coordinator`` and ``slipway worker``: start the services, whose own parsers read the options; ``slipway token``: make a token."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from slipway.cli import completion
from slipway.cli.options import Debug, Json, examples
from slipway.security.access.principals import Role

_OWN = {"ignore_unknown_options": True, "help_option_names": []}
"""Pass all words to the service's parser, even ``--help``."""

TOKEN_EXAMPLES = examples(
    "slipway token --name ci --role submitter --project research --token-file ci.token",
    "slipway token --name workers --role worker --token-file workers.token",
)


def _complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete the service's flags, or the values of the flag before the cursor."""
    before = (ctx.params.get("words") or [""])[-1]
    return completion.arguments(_parser(str(ctx.info_name)), before, incomplete)


Words = Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS]", autocompletion=_complete)]


class ServiceCommand(TyperCommand):
    """A command whose words a service's parser reads and completes, even those that look like options."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete a word with the service's parser."""
        return list(self.params[0].shell_complete(ctx, incomplete))


def coordinator(words: Words = None) -> None:
    """Start a coordinator: it runs the exports of clients on the workers that join it."""
    arguments = _parser("coordinator").parse_args(words or [])
    from slipway.distribution.extras import require

    require("coordinator", what="slipway coordinator")
    from slipway.contracts.coordinator import coordinator_service

    raise typer.Exit(_run(coordinator_service().main, arguments))


def worker(words: Words = None) -> None:
    """Start a worker: it joins a coordinator and runs stages for it."""
    arguments = _parser("worker").parse_args(words or [])
    from slipway.distribution.extras import require

    require("worker", what="slipway worker")
    from slipway.worker.main import main

    raise typer.Exit(_run(main, arguments))


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
    from slipway.security.access.access_file import as_yaml, issue_token

    entry = issue_token(token_file, name=name, role=role.value, projects=project or [])
    print_answer(entry, as_yaml(entry), as_json=as_json)


COMMANDS = {"coordinator": coordinator, "worker": worker}
SETTINGS: dict[str, Any] = {"cls": ServiceCommand, "context_settings": _OWN}


def _parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a service, which needs none of the service's libraries."""
    prog = f"slipway {name}"
    if name == "coordinator":
        from slipway.contracts.coordinator import coordinator_service

        return coordinator_service().parser(prog)
    from slipway.worker.flags import worker_parser

    return worker_parser(prog)


def _run(main: Any, arguments: argparse.Namespace) -> int:
    """Run a service with Python's default signal handlers, in place of those for interrupted commands."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return int(main(arguments))
