"""How a command line asks to be answered, known also when the rest of it is not valid."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup


@dataclass
class Asked:
    """What a command line asks of the boundary.

    Attributes:
        command: The command's name; empty before it is known.
        as_json: Print one JSON document on standard output, of a failure too.
        progress: Form of what goes to standard error; empty for the usual one.
        debug: Show the traceback of an unexpected error.
    """

    command: str = ""
    as_json: bool = False
    progress: str = ""
    debug: bool = False


class Commands(TyperGroup):
    """Commands by name. Before one is parsed in earnest, what it is asked is noted for the boundary."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note what is asked, and parse."""
        asked = ctx.find_object(Asked)
        if asked is not None:
            self._note(asked, ctx, list(args))
        return list(super().parse_args(ctx, args))

    def _note(self, asked: Asked, ctx: Any, words: list[str]) -> None:
        place = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
        name = "".join(words[place : place + 1])
        command = self.commands.get(name)
        if not isinstance(command, TyperCommand):  # a misspelled one, or none; any has the options that all share
            command = next(command for command in self.commands.values() if isinstance(command, TyperCommand))
        del words[place : place + 1]
        given = given_leniently(command, name, words, parent=ctx)
        asked.command = asked.command or name
        asked.as_json, asked.debug = bool(given.get("as_json")), bool(given.get("debug"))
        asked.progress = given.get("progress") or os.environ.get("SLIPWAY_PROGRESS", "").lower()


def given_leniently(command: TyperCommand, name: str | None, words: list[str], *, parent: Any) -> dict[str, Any]:
    """Return the parameters that a command is given, as far as they can be read: a mistake in one says nothing about others."""
    lenient = {"resilient_parsing": True, "ignore_unknown_options": True}
    return dict(command.make_context(name, words, parent=parent, **lenient).params)
