"""The command ``publish``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipway.cli.options import Debug, Json, Progress, examples, flag
from slipway.progress.observer import ProgressForm

PUBLISH_EXAMPLES = examples(
    "slipway publish exported/qwen3_20261121_020758 --key key.pem",
    "slipway publish exported/qwen3_20261121_020758 oci://registry.example.com/models/qwen3:v1 --key key.pem",
    "slipway publish exported/qwen3_20261121_020758 s3://models/qwen3/v1 --license Apache-2.0",
)


def publish(  # noqa: PLR0917 - typer calls it by name
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that slipway export delivered.")],
    destinations: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DESTINATION",
            help="oci://REGISTRY/NAME[:TAG], s3://BUCKET/PREFIX or mlflow:NAME; without any, only the proof is made.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Private key on P-256 in PEM, which signs the files; by default that of SLIPWAY_SIGNING_KEY.",
        ),
    ] = None,
    passphrase_file: Annotated[
        Path | None,
        typer.Option(
            "--passphrase-file",
            metavar="FILE",
            help="File with the key's passphrase; by default the variable SLIPWAY_SIGNING_PASSPHRASE.",
        ),
    ] = None,
    licence: Annotated[
        str, typer.Option("--license", metavar="SPDX", help="The model's licence, such as Apache-2.0.")
    ] = "",
    insecure: Annotated[
        bool, flag("--insecure", "Allow plain HTTP to a registry, which needs no asking on this machine.")
    ] = False,
    progress: Progress = ProgressForm.AUTO,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Publish a delivered folder with its proof: a statement of what was made, a bill of materials, and a signature.

    They are written beside the files. A folder with an output that failed validation is refused.

    A destination is not sent what it has already, and shows nothing before it has everything.

    Exit codes: 4 an output failed, or a signature is not of these files · 7 the destination is unavailable.
    """
    import os

    from slipway.cli.artifacts.view import show_transfer
    from slipway.publishing.bom import check_licence
    from slipway.publishing.destination import Access
    from slipway.publishing.publisher import publish as publish_folder
    from slipway.publishing.signing import read_passphrase
    from slipway.settings import Settings
    from slipway.terminal.console import print_answer

    settings = Settings.from_environment(os.environ)
    signing_key = key or settings.signing_key
    with show_transfer("publish", "publishing", form=progress, level=settings.log_level) as show:
        done = publish_folder(
            folder,
            destinations or [],
            access=Access(settings, os.environ, insecure=insecure),
            key=signing_key,
            passphrase=read_passphrase(passphrase_file, os.environ) if signing_key else None,
            licence=check_licence(licence) if licence else "",
            show=show,
        )
    print_answer(done.to_json(), str(done), as_json=as_json)
