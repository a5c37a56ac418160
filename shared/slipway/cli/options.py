"""Options that several commands share, and the options of a command line that concern the boundary.

The boundary needs the form of the output even if the rest of the line is not valid. ``--help`` imports this module, so it is light.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from slipway.cli import completion
from slipway.errors import MOST_TEXT
from slipway.progress.observer import ProgressForm
from slipway.texts import printable, redact, shortened

if TYPE_CHECKING:
    from slipway.errors import Failure


def error_line(failure: Failure) -> str:
    """Format the failure that ended a command as the last JSON line."""
    from slipway.observability.logs import JsonFormatter

    record = logging.LogRecord("slipway", logging.ERROR, "", 0, failure.message, None, None)
    facts = {"reason": failure.reason, "remedy": failure.remedy, "exit_code": failure.exit_code}
    record.__dict__.update(facts)
    return JsonFormatter(event="error").format(record)


def flag(name: str, meaning: str) -> Any:
    """Return an option without a value. The empty metavar keeps typer from showing ``<bool>``, as if it took one."""
    return typer.Option(name, metavar="", help=meaning)


def check_finite(value: float | None) -> float | None:
    """Refuse ``nan`` and ``inf``, which no range refuses."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


Json = Annotated[bool, flag("--json", "Print one JSON document on standard output.")]
Progress = Annotated[
    ProgressForm,
    typer.Option(
        "--progress",
        help="Progress and logs: a live table on a terminal and plain lines elsewhere (auto), or always one form.",
        envvar="SLIPWAY_PROGRESS",
        case_sensitive=False,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", min=0.1, max=31_536_000, callback=check_finite, help="Longest run, in seconds."),
]
Debug = Annotated[bool, flag("--debug", "Show tracebacks of unexpected errors.")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file with the export's settings.")
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        metavar="DIR|ID|URL",
        help="Base model: folder, id in the local cache, s3://…, hf://…, or digest.",
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="DIR|URL", help="Training run or one checkpoint: folder, s3://…, or digest."),
]
Run = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Training run or one checkpoint, as --checkpoint.", show_default=False),
]
Each = Annotated[
    Path | None,
    typer.Option(
        "--each",
        metavar="FOLDER",
        file_okay=False,
        help="Export every run, adapter and model in a folder, each with its name.",
    ),
]
Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--formats",
        "-f",
        metavar="FORMAT[:OPTION[+OPTION…]],…",
        help="The formats to make, and no others. An option is a level, none (unquantized), or setting=value.",
        autocompletion=completion.formats,
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="Where the model shall run (ollama, vllm, cpu-server …); chooses the format if none is named.",
        autocompletion=completion.targets,
    ),
]
BringSources = Annotated[
    bool,
    flag(
        "--bring-sources",
        "With a coordinator: read s3://… and hf://… here and send them, instead of letting a worker import them.",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME[:ADDRESS]",
        help="Without a coordinator: run the tasks on a cluster, such as ray:HOST:PORT; by default SLIPWAY_ENGINE, else here.",
    ),
]
RequestId = Annotated[
    str,
    typer.Option(
        "--request-id",
        metavar="TEXT",
        help="With a coordinator: name of this request; repeating the name returns the export made before.",
    ),
]
Out = Annotated[str | None, typer.Option("--out", metavar="DIR", help="Folder that receives the export's own folder.")]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="N,N,…",
        help="Return these layers' activations from exported graphs: numbers from 0, last or all.",
    ),
]
AllLayers = Annotated[bool, flag("--all-layers", "The same as --layers all.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Any setting; may be given several times.",
        autocompletion=completion.settings,
    ),
]


def examples(*lines: str) -> str:
    """Format the examples below a command's help, one line each."""
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"[dim]$[/dim] {line}" for line in lines)


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
