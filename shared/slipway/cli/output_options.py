"""Read the form of the output from a command line, even if the rest of the line is not valid."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup


@dataclass
class OutputOptions:
    """The options of a command line that concern the boundary.

    Attributes:
        command: The command's name; empty while unknown.
        as_json: Print one JSON document on standard output, even for a failure.
        progress: Form of the progress on standard error; empty for the default.
        debug: Show the traceback of an unexpected error.
    """

    command: str = ""
    as_json: bool = False
    progress: str = ""
    debug: bool = False


class Commands(TyperGroup):
    """A group of commands that records the options for the boundary before it parses a command strictly."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Record the options for the boundary, then parse the command line."""
        options = ctx.find_object(OutputOptions)
        if options is not None:
            self._record_options(options, ctx, list(args))
        return list(super().parse_args(ctx, args))

    def _record_options(self, options: OutputOptions, ctx: Any, words: list[str]) -> None:
        place = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
        name = "".join(words[place : place + 1])
        command = self.commands.get(name)
        if not isinstance(
            command, TyperCommand
        ):  # misspelled or missing; take any command, because all share these options
            command = next(command for command in self.commands.values() if isinstance(command, TyperCommand))
        del words[place : place + 1]
        given = given_leniently(command, words, parent=ctx)
        options.command = options.command or name
        options.as_json, options.debug = bool(given.get("as_json")), bool(given.get("debug"))
        options.progress = (given.get("progress") or os.environ.get("SLIPWAY_PROGRESS", "")).lower()


def given_leniently(command: TyperCommand, words: list[str], *, parent: Any) -> dict[str, Any]:
    """Return the given parameters as they are written, as far as they can be read; a mistake in one does not affect the others.

    The values are not converted, because typer imports pydantic for that, which takes longer than the rest of ``--help``.
    """
    context = command.context_class(command, parent=parent, resilient_parsing=True, ignore_unknown_options=True)
    given, _, _ = command.make_parser(context).parse_args(words)
    return dict(given)
