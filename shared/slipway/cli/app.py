"""The ``slipway`` command: its subcommands, in the order of ``--help``."""

from __future__ import annotations

from typing import Annotated

import typer

from slipway.cli import services
from slipway.cli.advice import commands as advice
from slipway.cli.artifacts import commands as artifacts
from slipway.cli.connection import ConnectedCommand
from slipway.cli.conversion import commands as conversion
from slipway.cli.export import command as export
from slipway.cli.inspection import commands as inspection
from slipway.cli.options import examples
from slipway.cli.output_options import Commands
from slipway.cli.remote import commands as remote
from slipway.cli.stages import commands as stages
from slipway.cli.stages.help import StageCommand

app = typer.Typer(
    name="slipway",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("slipway doctor", "slipway export -c export.yaml", "slipway export --help"),
)

_EXPORTS, _COORDINATOR = "Exports", "Exports of a coordinator"
_HERE, _ARTIFACTS, _SERVICES = "This machine", "Artifacts", "Services"

app.command(cls=ConnectedCommand, rich_help_panel=_EXPORTS, epilog=export.EXAMPLES)(export.export)
for name, (command, lines) in remote.COMMANDS.items():
    app.command(name, cls=ConnectedCommand, rich_help_panel=_COORDINATOR, epilog=examples(*lines))(command)
for name, service in services.COMMANDS.items():
    app.command(name, rich_help_panel=_SERVICES, **services.SETTINGS)(service)
app.command(rich_help_panel=_SERVICES, epilog=services.TOKEN_EXAMPLES)(services.token)
app.command(rich_help_panel=_HERE, epilog=inspection.DOCTOR_EXAMPLES)(inspection.doctor)
app.command(cls=ConnectedCommand, rich_help_panel=_HERE, epilog=inspection.CHECKPOINTS_EXAMPLES)(inspection.checkpoints)
app.command(rich_help_panel=_HERE, epilog=inspection.INSPECT_EXAMPLES)(inspection.inspect)
app.command(rich_help_panel=_HERE, epilog=advice.RECOMMEND_EXAMPLES)(advice.recommend)
app.command(rich_help_panel=_HERE, epilog=conversion.CONVERT_EXAMPLES)(conversion.convert)
app.command(rich_help_panel=_HERE, cls=StageCommand, epilog=stages.STAGE_EXAMPLES)(stages.stage)
app.command(rich_help_panel=_HERE, epilog=stages.SAMPLE_EXAMPLES)(stages.sample)
app.command(cls=ConnectedCommand, rich_help_panel=_ARTIFACTS, epilog=artifacts.VERIFY_EXAMPLES)(artifacts.verify)
app.command(cls=ConnectedCommand, rich_help_panel=_ARTIFACTS, epilog=artifacts.PUSH_EXAMPLES)(artifacts.push)
app.command(cls=ConnectedCommand, rich_help_panel=_ARTIFACTS, epilog=artifacts.PULL_EXAMPLES)(artifacts.pull)
app.add_typer(artifacts.cache, name="cache", rich_help_panel=_ARTIFACTS)


def _version(asked: bool) -> None:
    if asked:
        from slipway.distribution.installed import own_version

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
