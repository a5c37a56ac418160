"""Options that several commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from slipway.cli import completion
from slipway.cli.progress.forms import ProgressForm


def flag(name: str, meaning: str) -> Any:
    """Return an option without a value. The empty metavar keeps typer from showing ``<bool>``, as if it took one."""
    return typer.Option(name, metavar="", help=meaning)


def check_finite(value: float | None) -> float | None:
    """Refuse ``nan`` and ``inf``, which no range refuses."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def size_of(option: str, text: str) -> int:
    """Return the bytes of an option such as ``8GiB``.

    Raises:
        ConfigurationError: The text is not a size.
    """
    from slipway.errors import ConfigurationError
    from slipway.sizes import parse_size
    from slipway.texts import MalformedText

    try:
        return parse_size(text)
    except MalformedText as error:
        raise ConfigurationError(f"{option}: {error.message}", remedy=error.remedy, about={"key": option}) from error


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
