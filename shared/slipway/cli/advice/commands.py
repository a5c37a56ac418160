"""``slipway recommend``: which format and level to make for a target, why, and the configuration that makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipway.cli import completion
from slipway.cli.options import Debug, Json, examples, size_of

RECOMMEND_EXAMPLES = examples(
    "slipway recommend --target browser",
    "slipway recommend --target cpu-server --model merged --memory 8GiB",
    "slipway recommend --target vllm --model merged --report exported/qwen3 --json",
)


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
    from dataclasses import asdict

    from slipway.advice.candidates import recommend as candidates_for
    from slipway.advice.candidates import settings_for
    from slipway.advice.measured import read_measured
    from slipway.advice.subject import Subject
    from slipway.cli.advice.view import advice_view
    from slipway.cli.terminal.console import print_json, show
    from slipway.errors import ConfigurationError
    from slipway.formats.targets import target_name

    limit = size_of("--memory", memory) if memory else None
    if limit is not None and not model:
        raise ConfigurationError(
            "--memory is compared with the size of a model, and none is given",
            reason="PARAMS_INVALID",
            remedy="add --model DIR",
        )
    subject = Subject.read(model) if model else None
    target = target_name(target)
    candidates = candidates_for(target, subject=subject, memory=limit)
    measured = read_measured(report) if report else {}
    text = settings_for(candidates[0], target, model=model)
    if as_json:
        entries = [
            {
                "output": one.output,
                **asdict(one),
                "measured": asdict(measured[one.output]) if one.output in measured else None,
            }
            for one in candidates
        ]
        print_json({"target": target, "family": subject.family if subject else "", "candidates": entries, "yaml": text})
    else:
        show(*advice_view(target, candidates, measured, text))
