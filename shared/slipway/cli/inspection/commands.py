"""``slipway doctor`` and ``slipway checkpoints``: commands that change nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from slipway.cli.connection import artifacts_at, connection_of
from slipway.cli.options import Debug, Json, examples

DOCTOR_EXAMPLES = examples("slipway doctor", "slipway doctor --json")
CHECKPOINTS_EXAMPLES = examples(
    "slipway checkpoints outputs/qwen3-finetuned", "slipway checkpoints s3://bucket/runs/a --json"
)


def doctor(as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001 - read by the boundary
    """Say what can run on this machine, with which versions, and what is missing for the rest."""
    import os

    from slipway.cli.inspection.doctor_view import doctor_tables
    from slipway.cli.terminal.console import print_json, show
    from slipway.machine.doctor import examine
    from slipway.settings import Settings

    report = examine(Settings.from_environment(os.environ))
    if as_json:
        print_json(report.to_json())
    else:
        show(doctor_tables(report))


def checkpoints(
    ctx: typer.Context,
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="Folder of a training run, s3://bucket/prefix, or digest.")
    ],
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """List the checkpoints of a training run, newest first, and say which can be used."""
    import contextlib

    from slipway.cli.inspection.checkpoints_view import checkpoints_table
    from slipway.cli.terminal.console import print_json, show
    from slipway.errors import ModelExportError
    from slipway.model.runs.checkpoints import list_checkpoints, no_checkpoint
    from slipway.sources import SourceFolders

    connection = connection_of(ctx)
    settings = connection.settings()
    with contextlib.ExitStack() as stack:
        stored = directory.startswith("sha256:")
        store = stack.enter_context(artifacts_at(connection.coordinator, settings)) if stored else None
        folders = stack.enter_context(SourceFolders(settings, store))
        try:
            folder = folders.find(directory)
            found = list_checkpoints(folder)
            if not found:
                raise no_checkpoint(folder)
        except ModelExportError as error:
            raise folders.named(error) from error
        latest = next((checkpoint for checkpoint in found if checkpoint.healthy), None)
        document = {
            "directory": directory,
            "latest": folders.show(str(latest.path)) if latest else None,
            "best": next((folders.show(str(checkpoint.path)) for checkpoint in found if checkpoint.best), None),
            "checkpoints": [folders.show_all(checkpoint.to_json()) for checkpoint in found],
        }
        table = checkpoints_table(found, show=folders.show)
    if as_json:
        print_json(document)
    else:
        show(table)
