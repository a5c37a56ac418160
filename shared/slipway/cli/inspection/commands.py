"""``slipway doctor``, ``checkpoints``, ``inspect`` and ``recommend``: commands that change nothing.

``inspect`` runs a graph once in a process of its own, and compares it with its contract. ``recommend`` says which format and level
to make for a target, why, and with which configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipway.cli import completion
from slipway.cli.connection import connection_of
from slipway.cli.options import Debug, Json, check_finite, examples

if TYPE_CHECKING:
    from slipway.model.activations import ActivationContract


DOCTOR_EXAMPLES = examples("slipway doctor", "slipway doctor --json")
CHECKPOINTS_EXAMPLES = examples(
    "slipway checkpoints outputs/qwen3-finetuned", "slipway checkpoints s3://bucket/runs/a --json"
)

INSPECT_EXAMPLES = examples(
    "slipway inspect exported/qwen3/FORMAT", "slipway inspect GRAPH --contract activations.json --json"
)
_SECONDS = 300.0

RECOMMEND_EXAMPLES = examples(
    "slipway recommend --target browser",
    "slipway recommend --target cpu-server --model merged --memory 8GiB",
    "slipway recommend --target vllm --model merged --report exported/qwen3 --json",
)


def doctor(as_json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001 - read by the boundary
    """Say what can run on this machine, with which versions, and what is missing for the rest."""
    import os

    from slipway.cli.inspection.views import doctor_tables
    from slipway.machine.doctor import examine
    from slipway.settings import Settings
    from slipway.terminal.console import print_json, show

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

    from slipway.cli.inspection.views import checkpoints_table
    from slipway.errors import ModelExportError
    from slipway.exporting.opening import artifacts_at
    from slipway.model.runs.checkpoints import list_checkpoints, no_checkpoint
    from slipway.sources import SourceFolders
    from slipway.terminal.console import print_json, show

    connection = connection_of(ctx)
    settings = connection.settings()
    with contextlib.ExitStack() as stack:
        stored = directory.startswith("sha256:")
        store = stack.enter_context(artifacts_at(connection.coordinator, settings)) if stored else None
        folders = stack.enter_context(SourceFolders(settings, store))
        try:
            folder = folders.find(directory)
            run_checkpoints = list_checkpoints(folder)
            if not run_checkpoints:
                raise no_checkpoint(folder)
        except ModelExportError as error:
            raise folders.name_sources(error) from error
        latest = next((checkpoint for checkpoint in run_checkpoints if checkpoint.healthy), None)
        document = {
            "directory": directory,
            "latest": folders.show(str(latest.path)) if latest else None,
            "best": next(
                (folders.show(str(checkpoint.path)) for checkpoint in run_checkpoints if checkpoint.best), None
            ),
            "checkpoints": [folders.show_all(checkpoint.to_json()) for checkpoint in run_checkpoints],
        }
        table = checkpoints_table(run_checkpoints, show=folders.show)
    if as_json:
        print_json(document)
    else:
        show(table)


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="File of a graph, or a folder of graphs.")],
    contract: Annotated[
        Path | None,
        typer.Option(
            "--contract", metavar="FILE", help="Contract to compare with; by default activations.json beside the graph."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, max=86_400, callback=check_finite, help="Longest run, in seconds.")
    ] = _SECONDS,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Run a graph once on dummy input; show its inputs and outputs, and compare them with its contract of activations.

    Exit codes: 4 the contract is broken · 6 the graph was not run · 3 the file is not a valid graph or contract.
    """
    from slipway.cli.inspection.inspecting import inspect_graphs
    from slipway.cli.inspection.views import graph_tables
    from slipway.reasons import REASONS
    from slipway.terminal.console import answers, print_json, show

    agreed = _contract(model, contract)
    inspection = inspect_graphs(model, timeout=timeout)
    breaches: list[str] = []
    if agreed is not None:
        pairs = [
            (graph, part)
            for part in agreed.graphs
            for graph in inspection.graphs
            if graph.file == part.file or (model.is_file() and not agreed.further)
        ]
        breaches = [text for graph, part in pairs for text in graph.breaches(part)]
        lacking = [part.file for part in agreed.graphs if part not in [one for _, one in pairs]]
        if lacking and (model.is_dir() or not pairs):
            breaches.append(f"there is no {lacking[0]}, which the contract describes")
    reason = "CONTRACT_BROKEN" if breaches else "" if all(graph.ran for graph in inspection.graphs) else "GRAPH_NOT_RUN"
    compared = "none" if agreed is None else "broken" if breaches else "not run" if reason else "kept"
    if as_json:
        document = {"contract": compared, "breaches": breaches, "reason": reason}
        print_json({**inspection.model_dump(mode="json"), **document})
    else:
        for graph in inspection.graphs:
            show(*graph_tables(graph))
        for text in breaches:
            answers.print(text, soft_wrap=True, highlight=False, style="red")
        answers.print(f"contract: {compared}" if agreed else "no contract beside the graph", highlight=False)
    if reason:
        raise typer.Exit(REASONS[reason].category.exit_code)


def _contract(model: Path, given: Path | None) -> ActivationContract | None:
    """Read the contract; None if none is given and none lies beside the graph."""
    import os

    from slipway.model.activations import CONTRACT, read_contract

    path = given or (model if model.is_dir() else model.parent) / CONTRACT
    return read_contract(path) if given is not None or os.path.lexists(path) else None


def recommend(  # noqa: PLR0917 - typer calls it by name
    target: Annotated[
        str,
        typer.Option("--target", metavar="NAME", help="Where the model shall run.", autocompletion=completion.targets),
    ],
    model: Annotated[
        str,
        typer.Option("--model", metavar="DIR|ID", help="The model, for sizes: a folder, or an id in the local cache."),
    ] = "",
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory that the target has for it, such as 8GiB.")
    ] = "",
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="DIR|FILE", help="An earlier export or its report.json, for measured figures."
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Recommend a format and level for a target, and print the configuration that makes it.

    Targets: cpu-server, nvidia, apple, android, browser, edge, llama.cpp (or ollama), vllm. Only installed formats are considered. Sizes are
    estimates from above; memory includes a cache of 4,096 tokens. Exit codes: 6 nothing fits.
    """
    from slipway.advice.recommendation import recommend_outputs
    from slipway.cli.inspection.views import advice_view
    from slipway.settings.problems import size_of
    from slipway.terminal.console import print_json, show

    limit = size_of("--memory", memory) if memory else None
    advice = recommend_outputs(target, model=model, memory=limit, report=report)
    if as_json:
        print_json(advice.to_json())
    else:
        show(*advice_view(advice))
