"""``slipway doctor`` and ``slipway checkpoints``: looking without changing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipway.cli.options import Debug, Json, examples

DOCTOR_EXAMPLES = examples("slipway doctor", "slipway doctor --json")
CHECKPOINTS_EXAMPLES = examples("slipway checkpoints outputs/qwen3-finetuned", "slipway checkpoints run --json")


def doctor(as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001 - read by the boundary
    """Say what can run on this machine, with which versions, and what is missing for the rest."""
    import os

    from slipway.cli.console import answers, print_json
    from slipway.cli.doctor_view import doctor_tables
    from slipway.doctor import examine
    from slipway.settings import Settings

    report = examine(Settings.from_environment(os.environ))
    if as_json:
        print_json(report.to_json())
    else:
        answers.print(doctor_tables(report))


def checkpoints(
    directory: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """List the checkpoints of a training run, newest first, and say which can be used."""
    from slipway.checkpoints import list_checkpoints
    from slipway.cli.checkpoints_view import checkpoints_table
    from slipway.cli.console import answers, print_json
    from slipway.errors import CheckpointValidationError

    found = list_checkpoints(directory)
    if not found:
        raise CheckpointValidationError(
            f"no checkpoint in {directory}",
            reason="CHECKPOINT_NOT_FOUND",
            remedy="name a folder with checkpoint-<step> folders, or one with adapter_config.json",
            about={"checkpoint": directory},
        )
    if as_json:
        latest = next((checkpoint for checkpoint in found if checkpoint.healthy), None)
        print_json(
            {
                "directory": str(directory),
                "latest": str(latest.path) if latest else None,
                "checkpoints": [checkpoint.to_json() for checkpoint in found],
            }
        )
    else:
        answers.print(checkpoints_table(found))
