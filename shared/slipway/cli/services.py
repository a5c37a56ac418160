"""``slipway coordinator`` and ``slipway worker``: the services, with the options of their own parsers."""

from __future__ import annotations

import argparse
import signal
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from slipway.cli import completion

_OWN = {"ignore_unknown_options": True, "help_option_names": []}
"""Everything goes to the service's parser, ``--help`` too."""


def _complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """What the service's parser takes: its flags, or the values of the one before the cursor."""
    before = (ctx.params.get("words") or [""])[-1]
    return completion.arguments(_parser(str(ctx.info_name)), before, incomplete)


Words = Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS]", autocompletion=_complete)]


class ServiceCommand(TyperCommand):
    """A command that takes the words of a service's parser, and completes those that look like options with it too."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """What the parser takes."""
        return list(self.params[0].shell_complete(ctx, incomplete))


def coordinator(words: Words = None) -> None:
    """Start a coordinator: it carries out the exports of clients with the workers that join it."""
    arguments = _parser("coordinator").parse_args(words or [])
    from slipway.extras import require

    require("coordinator", what="slipway coordinator")
    from slipway_coordinator.main import main

    raise typer.Exit(_run(main, arguments))


def worker(words: Words = None) -> None:
    """Start a worker: it joins a coordinator and runs stages for it."""
    arguments = _parser("worker").parse_args(words or [])
    from slipway.extras import require

    require("worker", what="slipway worker")
    from slipway.worker.main import main

    raise typer.Exit(_run(main, arguments))


COMMANDS = {"coordinator": coordinator, "worker": worker}
SETTINGS: dict[str, Any] = {"cls": ServiceCommand, "context_settings": _OWN}


def _parser(name: str) -> argparse.ArgumentParser:
    """The parser of a service; it needs none of the service's libraries."""
    prog = f"slipway {name}"
    if name == "coordinator":
        from slipway_coordinator.flags import coordinator_parser

        return coordinator_parser(prog)
    from slipway.worker.flags import worker_parser

    return worker_parser(prog)


def _run(main: Any, arguments: argparse.Namespace) -> int:
    """Run a service with the signals of a process of its own: what Ctrl-C means to other commands is not meant here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return int(main(arguments))
