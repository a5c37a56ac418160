"""The command ``publish``."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from slipway.cli.connection import connection_of
from slipway.cli.options import Debug, Json, Progress, examples, flag
from slipway.progress.observer import ProgressForm

PUBLISH_EXAMPLES = examples(
    "slipway publish exported/qwen3_20261121_020758 --key key.pem",
    "slipway publish exported/qwen3_20261121_020758 oci://registry.example.com/models/qwen3:v1 --key key.pem",
    "slipway publish exported/qwen3_20261121_020758 s3://models/qwen3/v1 --license Apache-2.0",
    "slipway publish exported/qwen3_20261121_020758 --key key.pem --certificate signer.pem --certificate-chain intermediate.pem",
    "slipway publish exported/qwen3_20261121_020758 'oci://registry.example.com/models/qwen3:v1?modelcar'",
    "slipway publish e-0123456789abcdef01 oci://registry.example.com/models/qwen3:v1 --coordinator localhost:7070",
)


def publish(  # noqa: PLR0917 - typer calls it by name
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|EXPORT",
            help="Folder that slipway export delivered, or name or id of an export of the coordinator or of this machine.",
        ),
    ],
    destinations: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DESTINATION",
            help="oci://REGISTRY/NAME[:TAG][?modelcar[=BASE]], s3://BUCKET/PREFIX, hf://OWNER/NAME[@BRANCH][?public], mlflow:NAME, "
            "or kubeflow:NAME@ADDRESS with one of these; without any, only the proof is made.",
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
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--certificate",
            metavar="FILE",
            help="Certificate of the key in PEM, which goes into the signature; by default that of SLIPWAY_SIGNING_CERTIFICATE if --key is left out.",
        ),
    ] = None,
    certificate_chain: Annotated[
        Path | None,
        typer.Option(
            "--certificate-chain",
            metavar="FILE",
            help="Certificates in PEM that lead from it to a root; by default those of SLIPWAY_SIGNING_CERTIFICATE_CHAIN if --key is left out.",
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

    They are written beside the files. An export is delivered into a scratch folder first. If an output failed validation, nothing is
    published.

    A destination is not sent what it has already, and shows nothing before it has everything.

    Exit codes: 4 an output failed, or a signature is not of these files · 7 the destination is unavailable.
    """
    from slipway.cli.artifacts.view import show_transfer
    from slipway.publishing.bom import check_licence
    from slipway.publishing.destination import Access
    from slipway.publishing.publisher import publish as publish_folder
    from slipway.publishing.publisher import reach_destination
    from slipway.publishing.signatures.keys import read_passphrase
    from slipway.publishing.signatures.signing import signing_certificate
    from slipway.terminal.console import print_answer

    settings = connection_of(ctx).settings()
    signing_key = key or settings.signing_key
    if key is None and certificate is None:  # those of this machine are of the key of this machine
        certificate = settings.signing_certificate
        certificate_chain = certificate_chain or settings.signing_certificate_chain
    addresses, access = destinations or [], Access(settings, os.environ, insecure=insecure)
    send = partial(
        publish_folder,
        urls=addresses,
        access=access,
        key=signing_key,
        passphrase=read_passphrase(passphrase_file, os.environ) if signing_key else None,
        certificate=signing_certificate(certificate, certificate_chain, key=signing_key),
        licence=check_licence(licence) if licence else "",
    )
    with show_transfer("publish", "publishing", form=progress, level=settings.log_level) as show:
        folder = _folder_of(source)
        if folder is not None:
            done = send(folder, show=show)
        else:
            from slipway.exporting.stored_export import delivered_export

            _refuse_without(addresses)
            for address in addresses:
                reach_destination(address, access)
            with delivered_export(source, settings) as delivered:
                done = replace(send(delivered, show=show), folder="")
    print_answer(done.to_json(), str(done), as_json=as_json)


def _folder_of(source: str) -> Path | None:
    """Return the folder that is published; None if an export of this name is meant."""
    from slipway.exporting.stored_export import is_export_name
    from slipway.files.paths import user_path

    folder = user_path(source)
    return folder if os.path.lexists(folder) or not is_export_name(source) else None


def _refuse_without(addresses: list[str]) -> None:
    if not addresses:
        raise typer.BadParameter(
            "name a DESTINATION: the folder into which an export is delivered is removed at the end"
        )
