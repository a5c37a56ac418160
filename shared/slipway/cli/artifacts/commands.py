"""Artifacts: push, pull, verify, and the cache they lie in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipway.cli.connection import Connection, artifacts_at, with_connection
from slipway.cli.options import Debug, Json, examples
from slipway.counts import counted

PUSH_EXAMPLES = examples("slipway push merged", "slipway push base --coordinator coordinator:7070 --project research")
PULL_EXAMPLES = examples("slipway pull sha256:0123… model")
_NONE = Connection()
VERIFY_EXAMPLES = examples(
    "slipway verify exported/qwen3_20261121_020758",
    "slipway pull sha256:0123… model && slipway verify model",
    "slipway verify sha256:0123…",
)

cache = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Look at the artifact store, and clean it up.",
    epilog=examples("slipway cache ls", "slipway cache gc --older-than 30d"),
)


@with_connection
def push(
    folder: Annotated[Path, typer.Argument(help="Folder to store.")],
    connection: Connection = _NONE,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Put a folder into the artifact store, or bring it to a coordinator, and print its digest."""
    from slipway.cli.artifacts.cache_work import push_folder
    from slipway.cli.terminal.console import answers, print_json

    with artifacts_at(connection.coordinator, connection.settings()) as store:
        done = push_folder(folder, store)
    if as_json:
        print_json(done)
    else:
        answers.print(done["digest"], highlight=False)


@with_connection
def pull(
    digest: Annotated[str, typer.Argument(help="Digest, sha256:…")],
    folder: Annotated[Path, typer.Argument(help="New folder for its files.")],
    connection: Connection = _NONE,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Write an artifact's verified files into a new folder."""
    from slipway.cli.artifacts.cache_work import pull_artifact
    from slipway.cli.terminal.console import answers, print_json

    with artifacts_at(connection.coordinator, connection.settings()) as store:
        done = pull_artifact(digest, folder, store)
    if as_json:
        print_json(done)
    else:
        answers.print(f"{counted(done['files'], 'file')} in {folder}", highlight=False)


@with_connection
def verify(
    path: Annotated[str, typer.Argument(help="Folder of an export or of a pulled artifact, or an artifact's digest.")],
    connection: Connection = _NONE,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Compare every file with its checksum: of an output directory, a pulled artifact, or an artifact in the store."""
    from slipway.cli.artifacts.cache_work import verify_artifact, verify_folder
    from slipway.cli.terminal.console import answers, print_json

    if path.startswith("sha256:"):
        settings = connection.settings()
        with artifacts_at(connection.coordinator, settings) as store:
            done = verify_artifact(path, store, scratch=settings.scratch)
    else:
        done = verify_folder(path)
    if as_json:
        print_json(done)
    else:
        answers.print(f"{counted(done['files'], 'file')} compared: every checksum is right", highlight=False)


@cache.command("ls", epilog=examples("slipway cache ls", "slipway cache ls --json"))
def cache_ls(as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001 - read by the boundary
    """List artifacts, most recently used first."""
    from slipway.cli.artifacts.cache_view import cache_table
    from slipway.cli.artifacts.cache_work import list_cache
    from slipway.cli.terminal.console import print_json, show

    listing = list_cache()
    if as_json:
        print_json(listing)
    else:
        show(cache_table(listing))


@cache.command("gc", epilog=examples("slipway cache gc --older-than 30d", "slipway cache gc --max-size 50GB --dry-run"))
@with_connection
def cache_gc(  # noqa: PLR0917 - typer calls it by name
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Remove what was not used for so long: 12h, 30d.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option("--max-size", metavar="SIZE", help="Then the least recently used, down to this: 50GB.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    connection: Connection = _NONE,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Remove artifacts that no running export uses, and the blobs that only they had.

    Without a limit, only blobs that no artifact names go. What interrupted stages left for another attempt goes
    when it is older than AGE, or than 3 days. Beside a coordinator, name it: what its projects have is kept.
    """
    from slipway.cli.artifacts.cache_view import gc_line
    from slipway.cli.artifacts.cache_work import collect_cache
    from slipway.cli.terminal.console import answers, print_json

    done = collect_cache(connection, older_than=older_than, max_size=max_size, dry_run=dry_run)
    if as_json:
        print_json(done)
    else:
        answers.print(gc_line(done), highlight=False)
