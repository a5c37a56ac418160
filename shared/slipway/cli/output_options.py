"""Read the form of the output from a command line, even if the rest of the line is not valid."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from slipway.errors import MOST_TEXT
from slipway.redaction import redact
from slipway.texts import printable, shortened


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


@contextlib.contextmanager
def _clean_messages() -> Iterator[None]:
    """Clean the messages of misuse, which quote the command line: typer prints them as they are."""
    try:
        yield
    except Exception as error:
        message = getattr(error, "message", None)
        if hasattr(error, "format_message") and isinstance(message, str):  # click's; typer includes its own click
            error.message = shortened(printable(redact(message)), MOST_TEXT)  # type: ignore[attr-defined]
        raise


class Commands(TyperGroup):
    """A group of commands that records the options for the boundary before it parses a command strictly."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Parse the command line up to the command."""
        with _clean_messages():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Parse the rest of the command line, and run the command."""
        with _clean_messages():
            return super().invoke(ctx)

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
        given = parse_leniently(command, words, parent=ctx)
        options.command = options.command or name
        options.as_json, options.debug = bool(given.get("as_json")), bool(given.get("debug"))
        options.progress = (given.get("progress") or os.environ.get("SLIPWAY_PROGRESS", "")).lower()


def parse_leniently(command: TyperCommand, words: list[str], *, parent: Any) -> dict[str, Any]:
    """Parse the parameters of a command line as far as possible; a mistake in one does not affect the others.

    The values are not converted, because typer imports pydantic for that, which takes longer than the rest of ``--help``.
    """
    context = command.context_class(command, parent=parent, resilient_parsing=True, ignore_unknown_options=True)
    given, _, _ = command.make_parser(context).parse_args(words)
    return dict(given)
