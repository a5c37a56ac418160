"""Commands for the exports of a coordinator (submit, get, list, watch, cancel, retry, delete), its formats, workers and projects."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from slipway.cli.connection import connection_of
from slipway.cli.options import (
    Assignments,
    BaseModel,
    BringSources,
    Checkpoint,
    Config,
    Debug,
    Formats,
    Json,
    Progress,
    RequestId,
    Run,
    Target,
)
from slipway.progress.observer import ProgressForm

_EXPORT = "e-0123456789abcdef01"
_NOT_PUBLISHED = (
    "output.destinations: slipway submit does not publish, because it does not wait for the outputs; "
    "publish them when they are made, with slipway export and the same settings or with slipway publish"
)


Name = Annotated[str, typer.Argument(metavar="EXPORT", help="Name of the export, or its last part.")]
Deleted = Annotated[
    str,
    typer.Argument(
        metavar="EXPORT|DIGEST", help="Name of the export, or its last part; or an artifact's digest, sha256:…"
    ),
]
Filter = Annotated[
    str,
    typer.Option(
        "--filter",
        metavar="TEXT",
        help="List only matching exports, by state, creator, label.NAME, create_time and end_time; see examples.",
    ),
]
Priority = Annotated[
    int,
    typer.Option("--priority", min=-100, max=100, help="Among waiting exports of a project, the highest runs first."),
]


def submit(  # noqa: PLR0917 - typer calls it by name
    ctx: typer.Context,
    run: Run = None,
    config: Config = None,
    formats: Formats = None,
    target: Target = None,
    base_model: BaseModel = None,
    checkpoint: Checkpoint = None,
    assignments: Assignments = None,
    priority: Priority = 0,
    progress: Progress = ProgressForm.AUTO,
    request_id: RequestId = "",
    bring_sources: BringSources = False,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Create an export at a coordinator and return at once."""
    from slipway.cli.export.command import load_configuration
    from slipway.cli.remote.view import print_export, submitted_commands
    from slipway.export_sources.naming import sources_to_import
    from slipway.exporting.opening import artifacts_at
    from slipway.exporting.preparing import prepare_sources
    from slipway.progress.display import open_display
    from slipway.sources import SourceFolders

    connection = connection_of(ctx)
    loaded = load_configuration(
        config,
        base_model=base_model,
        checkpoint=checkpoint,
        out=None,
        assignments=assignments,
        run=run,
        formats=formats,
        target=target,
    )
    settings = connection.settings()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connection.client())
        store = stack.enter_context(artifacts_at(connection.coordinator, settings))
        folders = stack.enter_context(SourceFolders(settings, store))
        imports = {} if bring_sources else sources_to_import(loaded.configuration)
        with open_display(progress, level=loaded.configuration.log.level) as display:
            if loaded.configuration.output.destinations:
                display.log(logging.WARNING, _NOT_PUBLISHED)
            prepared = prepare_sources(loaded, folders, store, display, imports=imports, request_id=request_id)
        export = client.create_export(
            loaded.configuration,
            sources=prepared.digests,
            labels=prepared.labels,
            export_id=prepared.identity,
            priority=priority,
            source_formats=prepared.formats,
            request_id=prepared.request_id,
        )
    given = [("--base-model", base_model), ("--checkpoint", checkpoint), ("--target", target)]
    given += [("-f", each) for each in formats or []] + [("--set", each) for each in assignments or []]
    given.append(("--request-id", prepared.request_id or None))
    commands = submitted_commands(export, connection.options(), run=run, config=config, given=given)
    print_export(export, as_json=as_json, commands=commands)


def get(ctx: typer.Context, export: Name, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Show one export of a coordinator or of this machine, and how to fetch its outputs."""
    from slipway.cli.remote.view import fetch_commands, print_export

    connection = connection_of(ctx)
    state = ""
    if connection.coordinator:
        with connection.client() as client:
            message = client.get_export(export)
    else:
        _require_local()
        from slipway.embedded.local_exports import local_export

        local = local_export(connection.settings(), export)
        assert local.message is not None
        message, state = local.message, local.state
    print_export(message, as_json=as_json, state=state, commands=fetch_commands(message, connection.options()))


def list_exports(
    ctx: typer.Context,
    filter: Filter = "",  # noqa: A002 - the field's name everywhere
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """List the exports of a coordinator, or without one those that ran on this machine, newest first."""
    from slipway.cli.remote.view import print_exports, print_local_exports

    connection = connection_of(ctx)
    if not connection.coordinator:
        _require_local()
        from slipway.embedded.local_exports import local_exports

        print_local_exports(local_exports(connection.settings(), filter=filter), as_json=as_json)
        return
    with connection.client() as client:
        exports = client.list_exports(filter=filter, page_size=1000, summary=not as_json)
        print_exports(list(exports), as_json=as_json)


def watch(
    ctx: typer.Context,
    export: Name,
    progress: Progress = ProgressForm.AUTO,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Follow an export to its end; Ctrl-C only stops watching."""
    from slipway.cli.remote.view import exit_code_of, fetch_commands, follow, print_export

    connection = connection_of(ctx)
    with connection.client() as client:
        ended = follow(client, export, progress=progress, level=connection.settings().log_level)
    print_export(ended, as_json=as_json, commands=fetch_commands(ended, connection.options()))
    raise typer.Exit(exit_code_of(ended))


def cancel(ctx: typer.Context, export: Name, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Cancel an export."""
    from slipway.cli.remote.view import print_export

    with connection_of(ctx).client() as client:
        print_export(client.cancel_export(export), as_json=as_json)


def retry(ctx: typer.Context, export: Name, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Run an ended, unsuccessful export again; finished tasks are kept."""
    from slipway.cli.remote.view import print_export

    with connection_of(ctx).client() as client:
        print_export(client.retry_export(export), as_json=as_json)


def delete(ctx: typer.Context, name: Deleted, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Delete an ended export, or a pushed artifact: its bytes no longer count for the project. A cleanup removes them once they are old.

    An artifact that exports have as a source or result stays until they are deleted, too.
    """
    from slipway.cli.remote.view import deletion_line
    from slipway.client import export_name
    from slipway.client.calls import artifact_name
    from slipway.terminal.console import print_answer

    with connection_of(ctx).client() as client:
        if name.startswith("sha256:"):
            deleted, kept = artifact_name(name, project=client.project), client.delete_artifact(name)
        else:
            deleted, kept = export_name(name, project=client.project), []
            client.delete_export(deleted)
    print_answer({"deleted": deleted, "exports": kept}, deletion_line(deleted, kept), as_json=as_json)


def formats(ctx: typer.Context, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """List the formats that the workers of a coordinator, or without one this machine, can make now, and what keeps them from others."""
    from slipway.cli.remote.capacity import local_formats, print_formats

    connection = connection_of(ctx)
    if not connection.coordinator:
        print_formats(*local_formats(), as_json=as_json)
        return
    with connection.client() as client:
        print_formats(list(client.list_formats()), client.validation_obstacle(), as_json=as_json)


def workers(ctx: typer.Context, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """List the workers of a coordinator, and the tasks that wait for one with the reason, as far as you may see them."""
    from slipway.cli.remote.capacity import print_workers

    with connection_of(ctx).client() as client:
        print_workers(client.list_workers(), as_json=as_json)


def projects(ctx: typer.Context, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """List your projects at a coordinator, with what they use and how much of it they may have."""
    from slipway.cli.remote.projects import print_projects

    with connection_of(ctx).client() as client:
        print_projects(list(client.list_projects()), as_json=as_json)


def _require_local() -> None:
    """Check that the libraries that read this machine's exports are installed."""
    from slipway.distribution import require

    require("coordinator", what="reading the exports of this machine", otherwise="name one: --coordinator HOST:PORT")


COMMANDS: Mapping[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "submit": (
        submit,
        (
            "slipway submit -c export.yaml --coordinator localhost:7070",
            "slipway submit s3://runs/qwen3-finetuned -f gguf:q4_k_m --coordinator localhost:7070",
        ),
    ),
    "get": (get, (f"slipway get {_EXPORT}", f"slipway get projects/research/exports/{_EXPORT} --json")),
    "list": (list_exports, ("slipway list", "slipway list --filter 'state=running AND label.model_name=qwen3'")),
    "watch": (watch, (f"slipway watch {_EXPORT}",)),
    "cancel": (cancel, (f"slipway cancel {_EXPORT}",)),
    "retry": (retry, (f"slipway retry {_EXPORT}",)),
    "delete": (delete, (f"slipway delete {_EXPORT}",)),
    "formats": (formats, ("slipway formats", "slipway formats --coordinator localhost:7070 --json")),
    "workers": (workers, ("slipway workers --coordinator localhost:7070",)),
    "projects": (projects, ("slipway projects --coordinator localhost:7070",)),
}
"""Commands by name, in the order of the help, with their examples."""
