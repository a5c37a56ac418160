"""Exports of a coordinator: submit, get, list, watch, cancel, retry, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slipway.cli.options import Assignments, BaseModel, Checkpoint, Config, Coordinator, Debug, Json, examples

if TYPE_CHECKING:
    from slipway.client import Client

EXAMPLES = examples(
    "slipway submit -c export.yaml --coordinator localhost:7070",
    "slipway list",
    "slipway watch projects/default/exports/e-0123456789abcdef01",
)

Name = Annotated[str, typer.Argument(metavar="EXPORT", help="Name of the export, or its last part.")]


def submit(  # noqa: PLR0917 - typer calls it by name
    config: Config = None,
    base_model: BaseModel = None,
    checkpoint: Checkpoint = None,
    assignments: Assignments = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Create an export at a coordinator and return at once."""
    import os

    from slipway.artifacts.opening import open_store
    from slipway.cli.export import load_configuration
    from slipway.cli.identity import export_identity
    from slipway.cli.remote_view import answer_export
    from slipway.cli.sources import find_sources, store_sources
    from slipway.settings import Settings

    loaded = load_configuration(config, base_model=base_model, checkpoint=checkpoint, out=None, assignments=assignments)
    with _connect(coordinator) as client:
        sources = find_sources(loaded.configuration)
        store = open_store(Settings.from_environment(os.environ))
        digests = store_sources(sources, store, on_bytes=lambda name, done, total: None)  # noqa: ARG005
        identity = export_identity(loaded.configuration, digests)
        export = client.create_export(
            loaded.configuration, sources=digests, labels=sources.labels(), export_id=identity
        )
    answer_export(export, as_json=as_json)


def get(export: Name, coordinator: Coordinator = None, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Show one export."""
    from slipway.cli.remote_view import answer_export

    with _connect(coordinator) as client:
        answer_export(client.get_export(_full(export)), as_json=as_json)


def list_exports(coordinator: Coordinator = None, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """List exports, newest first."""
    from slipway.cli.remote_view import answer_exports

    with _connect(coordinator) as client:
        answer_exports(list(client.list_exports()), as_json=as_json)


def watch(export: Name, coordinator: Coordinator = None, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Follow an export to its end; Ctrl-C only stops watching."""
    from slipway.cli.remote_view import answer_export, exit_code_of, follow

    with _connect(coordinator) as client:
        ended = follow(client, _full(export))
    answer_export(ended, as_json=as_json)
    raise typer.Exit(exit_code_of(ended))


def cancel(export: Name, coordinator: Coordinator = None, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Cancel an export."""
    from slipway.cli.remote_view import answer_export

    with _connect(coordinator) as client:
        answer_export(client.cancel_export(_full(export)), as_json=as_json)


def retry(export: Name, coordinator: Coordinator = None, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Run an ended, unsuccessful export again; finished tasks are kept."""
    from slipway.cli.remote_view import answer_export

    with _connect(coordinator) as client:
        answer_export(client.retry_export(_full(export)), as_json=as_json)


def delete(export: Name, coordinator: Coordinator = None, as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Forget an ended export."""
    from slipway.cli.console import answers, print_json

    name = _full(export)
    with _connect(coordinator) as client:
        client.delete_export(name)
    if as_json:
        print_json({"deleted": name})
    else:
        answers.print(f"deleted {name}", highlight=False)


def _connect(coordinator: str | None) -> Client:
    if not coordinator:
        raise typer.BadParameter("give --coordinator HOST:PORT or set SLIPWAY_COORDINATOR")
    from slipway.client import Client

    return Client(coordinator)


def _full(export: str) -> str:
    return export if "/" in export else f"projects/default/exports/{export}"
