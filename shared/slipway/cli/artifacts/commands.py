"""Commands for artifacts: push, pull, verify and cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipway.cli.connection import ConnectedCommand, connection_of
from slipway.cli.options import Commands, Debug, Json, Progress, examples, flag
from slipway.progress.observer import ProgressForm
from slipway.texts import counted

PUSH_EXAMPLES = examples("slipway push merged", "slipway push base --coordinator coordinator:7070 --project research")
PULL_EXAMPLES = examples("slipway pull sha256:0123… model")
VERIFY_EXAMPLES = examples(
    "slipway verify exported/qwen3_20261121_020758",
    "slipway verify exported/qwen3_20261121_020758 --key key.pub",
    "slipway verify oci://registry.example.com/models/qwen3:v1 --key key.pub",
    "slipway pull sha256:0123… model && slipway verify model",
    "slipway verify sha256:0123…",
)

cache = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="List the artifact store, and clean it up.",
    epilog=examples("slipway cache ls", "slipway cache gc --older-than 30d"),
)


def push(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to store.")],
    progress: Progress = ProgressForm.AUTO,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Put a folder into the artifact store, or send it to a coordinator, and print its digest."""
    from slipway.cli.artifacts.cache_work import push_folder
    from slipway.cli.artifacts.view import show_transfer
    from slipway.exporting.opening import artifacts_at
    from slipway.terminal.console import print_answer

    connection = connection_of(ctx)
    settings = connection.settings()
    with (
        artifacts_at(connection.coordinator, settings) as store,
        show_transfer("push", "storing", form=progress, level=settings.log_level) as show,
    ):
        done = push_folder(folder, store, show=show)
    print_answer(done, done["digest"], as_json=as_json)


def pull(  # noqa: PLR0917 - typer calls it by name
    ctx: typer.Context,
    digest: Annotated[str, typer.Argument(metavar="DIGEST", help="Digest, sha256:…")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for its files.")],
    progress: Progress = ProgressForm.AUTO,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Write an artifact's verified files into a new folder."""
    from slipway.cli.artifacts.cache_work import pull_artifact
    from slipway.cli.artifacts.view import show_transfer
    from slipway.exporting.opening import artifacts_at
    from slipway.terminal.console import print_answer

    connection = connection_of(ctx)
    settings = connection.settings()
    with (
        artifacts_at(connection.coordinator, settings) as store,
        show_transfer("pull", "fetching", form=progress, level=settings.log_level) as show,
    ):
        done = pull_artifact(digest, folder, store, show=show)
    print_answer(done, f"{counted(done['files'], 'file')} in {folder}", as_json=as_json)


def verify(  # noqa: PLR0917 - typer calls it by name
    ctx: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="Folder of an export or of a pulled artifact, an artifact's digest, oci://REGISTRY/NAME[:TAG], or "
            "hf://OWNER/NAME[@REVISION].",
        ),
    ],
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Public key in PEM that must have signed the files.")
    ] = None,
    certificate_chain: Annotated[
        Path | None,
        typer.Option(
            "--certificate-chain",
            metavar="FILE",
            help="Roots in PEM: the files must be signed with a certificate that leads to one of them.",
        ),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(
            "--identity",
            metavar="NAME",
            help="Identity of Sigstore that must have signed: an address, or a workflow's URL.",
        ),
    ] = None,
    identity_provider: Annotated[
        str | None, typer.Option("--identity-provider", metavar="URL", help="Provider that told the identity.")
    ] = None,
    trusted_root: Annotated[
        Path | None,
        typer.Option(
            "--trusted-root", metavar="FILE", help="The Sigstore instance's trusted_root.json, for --identity."
        ),
    ] = None,
    insecure: Annotated[
        bool, flag("--insecure", "Allow plain HTTP to a registry, which needs no asking on this machine.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Compare every file of an output directory, a pulled artifact, or an artifact in the store with its checksum.

    With --key, --certificate-chain or --identity, every file must be signed by it, and no output may have failed validation.

    A published model in a registry is checked without downloading its weights.

    Exit codes: 4 the signature or the statement is not right, or an output failed · 7 a file is not as it was written.
    """
    from slipway.exporting.verification import verify_path
    from slipway.publishing.signatures.trust import trusted_signer
    from slipway.terminal.console import print_answer

    trusted = trusted_signer(
        key=key, roots=certificate_chain, identity=identity, provider=identity_provider, trusted_root=trusted_root
    )
    done = verify_path(path, connection_of(ctx).settings, trusted=trusted, insecure=insecure)
    print_answer(done.to_json(), str(done), as_json=as_json)


@cache.command("ls", epilog=examples("slipway cache ls", "slipway cache ls --json"))
def cache_ls(as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001 - read by the boundary
    """List artifacts, most recently used first."""
    from slipway.cli.artifacts.cache_work import list_cache
    from slipway.cli.artifacts.view import cache_table
    from slipway.terminal.console import print_json, show

    listing = list_cache()
    if as_json:
        print_json(listing)
    else:
        show(cache_table(listing))


@cache.command(
    "gc",
    epilog=examples("slipway cache gc --older-than 30d", "slipway cache gc --max-size 50GB --dry-run"),
    cls=ConnectedCommand,
)
def cache_gc(  # noqa: PLR0917 - typer calls it by name
    ctx: typer.Context,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Remove artifacts unused for this long: 12h, 30d.")
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option("--max-size", metavar="SIZE", help="Then remove the least recently used, down to this: 50GB."),
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Only say what would be removed.")] = False,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Remove artifacts that no running export uses, and the blobs that only they use.

    Without a limit, only blobs that no artifact uses are removed. Files that interrupted stages left for another
    attempt are removed when they are older than AGE, or than 3 days. If a coordinator uses the store, name it, so
    that the artifacts of its projects are kept.
    """
    from slipway.cli.artifacts.cache_work import collect_cache
    from slipway.cli.artifacts.view import gc_line
    from slipway.terminal.console import print_answer

    done = collect_cache(connection_of(ctx), older_than=older_than, max_size=max_size, dry_run=dry_run)
    print_answer(done, gc_line(done), as_json=as_json)
