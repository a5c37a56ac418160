"""``slipway convert``: pickles of weights to safetensors, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipway.cli.options import Debug, Json, Progress, Timeout, examples
from slipway.progress.observer import ProgressForm

CONVERT_EXAMPLES = examples(
    "slipway convert models/old-bert --out models/bert",
    "slipway convert lora.pt --key state_dict --out lora",
    "slipway convert models --out converted --json",
)


def convert(  # noqa: PLR0917 - typer calls it by name
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="File of weights (.bin, .pt, .pth, .ckpt), model, or tree of models."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder that receives the safetensors.")],
    key: Annotated[
        str,
        typer.Option("--key", metavar="NAME", help="Entry of the pickle that holds the weights, if it has several."),
    ] = "",
    timeout: Timeout = None,
    progress: Progress = ProgressForm.AUTO,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Convert pickled weights to safetensors, bit for bit, without running the pickle's code.

    Configuration and tokenizer are copied. The source stays as it is. In a tree, weights that are refused keep no others from
    being converted; the exit code is then that of the first refusal.
    """
    from slipway.distribution import require, stage_extra
    from slipway.registry import stage_of
    from slipway.stage import Role

    install = stage_extra(stage_of(Role.CONVERSION).params.__module__)
    require("worker", what="slipway convert", install=install)
    from slipway.cli.conversion.converting import conversion_table, convert_weights
    from slipway.reasons import REASONS
    from slipway.terminal.console import print_json, show

    conversion = convert_weights(source, out, key=key, timeout=timeout, progress=progress)
    if as_json:
        print_json({"out": str(out.resolve()), **conversion.model_dump(mode="json")})
    else:
        show(*conversion_table(conversion))
    reason = next((one.reason for one in conversion.weights if one.reason), "")
    if reason:
        raise typer.Exit(REASONS[reason].category.exit_code)
