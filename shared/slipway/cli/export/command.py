"""``slipway export``: the main command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipway.cli.connection import connection_of
from slipway.cli.options import (
    AllLayers,
    Assignments,
    BaseModel,
    BringSources,
    Checkpoint,
    Config,
    Debug,
    Each,
    Engine,
    Formats,
    Json,
    Layers,
    Out,
    Progress,
    RequestId,
    Run,
    Target,
    examples,
    flag,
)
from slipway.progress.observer import ProgressForm

if TYPE_CHECKING:
    from slipway.configuration import LoadedConfiguration
    from slipway.settings import Settings

EXAMPLES = examples(
    "slipway export outputs/qwen3-finetuned -f gguf:q4_k_m",
    "slipway export outputs/qwen3-finetuned -f pytorch,gguf:none+q4_k_m+q8_0,onnx:int8+opset_version=18",
    "slipway export outputs/qwen3-finetuned --target ollama",
    "slipway export -c export.yaml",
    "slipway export -c export.yaml --plan",
    "slipway export outputs/qwen3-finetuned --base-model Qwen/Qwen3-4B --out exported",
    "slipway export -c export.yaml --layers 0,5,11",
    "slipway export outputs/qwen3-finetuned --engine ray:head.cluster:6379",
    "slipway export --each sweep -f gguf:q4_k_m,onnx:int8 --base-model Qwen/Qwen3-4B --out exported",
    "slipway export -c export.yaml --set optimization.quantization=int8,int4 --set validation.test_samples=100",
)


def load_configuration(
    config: Path | None,
    *,
    base_model: str | None,
    checkpoint: str | None,
    out: str | None,
    assignments: list[str] | None,
    run: str | None = None,
    formats: list[str] | None = None,
    target: str | None = None,
    layers: str | None = None,
    subject: Mapping[str, str | None] | None = None,
) -> LoadedConfiguration:
    """Load the configuration from file, environment and flags; those of ``subject`` come before the others.

    Raises:
        BadParameter: The run is given twice, or is a configuration.
    """
    import os

    from slipway.advice.for_target import load_configuration as load

    if run is not None and checkpoint is not None:
        raise typer.BadParameter(f"RUN ({run}) and --checkpoint ({checkpoint}) name the same; give one of them")
    if run is not None and run.endswith((".yaml", ".yml")):
        raise typer.BadParameter(f"RUN is the folder of a training run; a configuration is given as -c {run}")
    return load(
        config,
        environment=os.environ,
        flags={
            "RUN": run,
            "--base-model": base_model,
            "--checkpoint": checkpoint,
            "--target": target,
            "--out": out,
            "--layers": layers,
            **(subject or {}),
        },
        assignments=assignments or [],
        requested=formats or [],
    )


def export(  # noqa: PLR0917 - typer calls it by name
    ctx: typer.Context,
    run: Run = None,
    each: Each = None,
    config: Config = None,
    formats: Formats = None,
    target: Target = None,
    base_model: BaseModel = None,
    checkpoint: Checkpoint = None,
    out: Out = None,
    layers: Layers = None,
    all_layers: AllLayers = False,
    assignments: Assignments = None,
    bring_sources: BringSources = False,
    engine: Engine = None,
    request_id: RequestId = "",
    plan: Annotated[bool, flag("--plan", "Show settings, tasks and preflight; run nothing.")] = False,
    progress: Progress = ProgressForm.AUTO,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Merge, quantize, export and validate a fine-tuned checkpoint; deliver the models and a report.

    The same command again continues where an earlier one stopped, and reuses all finished results. With --each, every run, adapter and
    model in a folder is exported, and a failure does not end the others.
    """
    settings = connection_of(ctx).settings()
    if engine is not None:
        if settings.coordinator:
            raise typer.BadParameter(f"--engine excludes a coordinator, and {settings.coordinator} is named")
        settings = settings.model_copy(update={"engine": engine})
    if all_layers and layers:
        raise typer.BadParameter("--layers and --all-layers exclude each other")
    if each is not None and (run is not None or checkpoint is not None):
        raise typer.BadParameter("--each names a folder of runs; leave out RUN and --checkpoint")
    load = functools.partial(
        load_configuration,
        config,
        base_model=base_model,
        checkpoint=checkpoint,
        out=out,
        assignments=assignments,
        run=run,
        formats=formats,
        target=target,
        layers="all" if all_layers else layers,
    )
    if each is not None:
        raise typer.Exit(
            _export_each(
                each,
                lambda flags: load(subject=flags),
                settings,
                plan=plan,
                as_json=as_json,
                progress=progress,
                bring_sources=bring_sources,
                request_id=request_id,
            )
        )
    loaded = load()
    if plan:
        from slipway.cli.export.planned import show_plan

        code = show_plan(loaded, settings, as_json=as_json)
    else:
        from slipway.cli.export.exported import show_export

        code = show_export(
            loaded,
            settings,
            as_json=as_json,
            progress=progress,
            bring_sources=bring_sources,
            request_id=request_id,
        )
    raise typer.Exit(code)


def _export_each(
    folder: Path,
    load: Callable[[Mapping[str, str | None]], LoadedConfiguration],
    settings: Settings,
    *,
    plan: bool,
    as_json: bool,
    progress: ProgressForm,
    bring_sources: bool,
    request_id: str,
) -> int:
    """Run or plan the exports of a folder; return the exit code."""
    from slipway.cli.export.batch import show_batch, show_batch_plan

    if plan:
        return show_batch_plan(folder, load, settings, as_json=as_json, bring_sources=bring_sources)
    return show_batch(
        folder,
        load,
        settings,
        as_json=as_json,
        progress=progress,
        bring_sources=bring_sources,
        request_id=request_id,
    )
