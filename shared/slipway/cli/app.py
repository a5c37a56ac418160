"""The ``slipway`` command: its subcommands, in the order of ``--help``.

``slipway coordinator`` and ``slipway worker`` start the services, whose own parsers read the options. ``slipway token`` makes a token.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from slipway.cli import completion
from slipway.cli.artifacts import commands as artifacts
from slipway.cli.connection import ConnectedCommand
from slipway.cli.console import commands as console
from slipway.cli.conversion import commands as conversion
from slipway.cli.export import command as export
from slipway.cli.inspection import commands as inspection
from slipway.cli.options import Commands, Debug, Json, examples
from slipway.cli.publishing import commands as publishing
from slipway.cli.remote import commands as remote
from slipway.cli.stages import commands as stages
from slipway.cli.stages.commands import StageCommand
from slipway.security.access.principals import Role

_UNPARSED = {"ignore_unknown_options": True, "help_option_names": []}
"""Pass all words to the service's parser, even ``--help``."""

TOKEN_EXAMPLES = examples(
    "slipway token --name ci --role submitter --project research --token-file ci.token",
    "slipway token --name workers --role worker --token-file workers.token",
)

_EXPORTS, _COORDINATOR = "Exports", "Exports of a coordinator"
_HERE, _ARTIFACTS, _SERVICES = "This machine", "Artifacts", "Services"


def _complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete the service's flags, or the values of the flag before the cursor."""
    before = (ctx.params.get("words") or [""])[-1]
    return completion.arguments(_service_parser(str(ctx.info_name)), before, incomplete)


Words = Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS]", autocompletion=_complete)]


class ServiceCommand(TyperCommand):
    """A command whose words a service's parser reads and completes, even those that look like options."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete a word with the service's parser."""
        return list(self.params[0].shell_complete(ctx, incomplete))


def coordinator(words: Words = None) -> None:
    """Start a coordinator: it runs the exports of clients on the workers that join it."""
    arguments = _service_parser("coordinator").parse_args(words or [])
    from slipway.distribution import require

    require("coordinator", what="slipway coordinator")
    from slipway.contracts.coordinator import coordinator_service

    raise typer.Exit(_run_service(coordinator_service().main, arguments))


def worker(words: Words = None) -> None:
    """Start a worker: it joins a coordinator and runs stages for it."""
    arguments = _service_parser("worker").parse_args(words or [])
    from slipway.distribution import require

    require("worker", what="slipway worker")
    from slipway.worker.main import main

    raise typer.Exit(_run_service(main, arguments))


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
    from slipway.security.access.access_file import as_yaml, issue_token
    from slipway.terminal.console import print_answer

    entry = issue_token(token_file, name=name, role=role.value, projects=project or [])
    print_answer(entry, as_yaml(entry), as_json=as_json)


_SERVICE_COMMANDS = {"coordinator": coordinator, "worker": worker}
_SERVICE_SETTINGS: dict[str, Any] = {"cls": ServiceCommand, "context_settings": _UNPARSED}


def _service_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a service, which needs none of the service's libraries."""
    prog = f"slipway {name}"
    if name == "coordinator":
        from slipway.contracts.coordinator import coordinator_service

        return coordinator_service().parser(prog)
    from slipway.service_flags import worker_parser

    return worker_parser(prog)


def _run_service(main: Any, arguments: argparse.Namespace) -> int:
    """Run a service with Python's default signal handlers, in place of those for interrupted commands."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return int(main(arguments))


app = typer.Typer(
    name="slipway",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("slipway doctor", "slipway export -c export.yaml", "slipway export --help"),
)


app.command(cls=ConnectedCommand, rich_help_panel=_EXPORTS, epilog=export.EXAMPLES)(export.export)
app.command(cls=ConnectedCommand, rich_help_panel=_EXPORTS, epilog=console.EXAMPLES)(console.ui)
for command_name, (command, lines) in remote.COMMANDS.items():
    app.command(command_name, cls=ConnectedCommand, rich_help_panel=_COORDINATOR, epilog=examples(*lines))(command)
for service_name, service in _SERVICE_COMMANDS.items():
    app.command(service_name, rich_help_panel=_SERVICES, **_SERVICE_SETTINGS)(service)
app.command(rich_help_panel=_SERVICES, epilog=TOKEN_EXAMPLES)(token)
app.command(rich_help_panel=_HERE, epilog=inspection.DOCTOR_EXAMPLES)(inspection.doctor)
app.command(cls=ConnectedCommand, rich_help_panel=_HERE, epilog=inspection.CHECKPOINTS_EXAMPLES)(inspection.checkpoints)
app.command(rich_help_panel=_HERE, epilog=inspection.INSPECT_EXAMPLES)(inspection.inspect)
app.command(rich_help_panel=_HERE, epilog=inspection.RECOMMEND_EXAMPLES)(inspection.recommend)
app.command(rich_help_panel=_HERE, epilog=conversion.CONVERT_EXAMPLES)(conversion.convert)
app.command(rich_help_panel=_HERE, cls=StageCommand, epilog=stages.STAGE_EXAMPLES)(stages.stage)
app.command(rich_help_panel=_HERE, epilog=stages.SAMPLE_EXAMPLES)(stages.sample)
app.command(cls=ConnectedCommand, rich_help_panel=_ARTIFACTS, epilog=artifacts.VERIFY_EXAMPLES)(artifacts.verify)
app.command(cls=ConnectedCommand, rich_help_panel=_ARTIFACTS, epilog=artifacts.PUSH_EXAMPLES)(artifacts.push)
app.command(cls=ConnectedCommand, rich_help_panel=_ARTIFACTS, epilog=artifacts.PULL_EXAMPLES)(artifacts.pull)
app.command(cls=ConnectedCommand, rich_help_panel=_ARTIFACTS, epilog=publishing.PUBLISH_EXAMPLES)(publishing.publish)
app.add_typer(artifacts.cache, name="cache", rich_help_panel=_ARTIFACTS)


def _version(asked: bool) -> None:
    if asked:
        from slipway.distribution import own_version

        typer.echo(f"slipway {own_version()}")
        raise typer.Exit


@app.callback()
def slipway(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Turn a finished LoRA training run into merged, quantized, exported and proven models.

    Exit codes: 0 done · 2 usage · 3 invalid input · 4 validation failed ·
    5 out of a resource · 6 unsupported · 7 unavailable, try again · 130 interrupted ·
    141 the reader of the output has closed it · 1 a fault of Slipway itself: please report it
    """
