"""``slipway stage NAME --help``: show the stage's inputs, outputs and parameters."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from typer.core import TyperCommand

from slipway.cli.output_options import parse_leniently

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from slipway.stage import Stage


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
        from slipway.cli.terminal.console import answers
        from slipway.registry import load_stage

        stage = load_stage(name)
        super().format_help(ctx, formatter)
        answers.print("\n".join(stage_help(stage, width=min(answers.width, 100))), highlight=False, markup=False)


def stage_help(stage: Stage[Any], *, width: int) -> Iterator[str]:
    """Yield lines about a stage: inputs, outputs, and parameters with type, default and meaning."""
    more = " …, and others by a name of your choice" if stage.more_inputs else ""
    yield f" {stage.name}, version {stage.version}"
    yield ""
    optional = f"; optional: {', '.join(stage.optional_inputs)}" if stage.optional_inputs else ""
    yield f" Inputs (--input NAME=DIR):  {', '.join(stage.inputs)}{optional}{more}"
    yield f" Outputs (below --out):      {', '.join(stage.outputs)}"
    yield ""
    yield " Parameters (--param KEY=VALUE):"
    for name, kind, default, meaning in parameters(stage.params):
        yield f"   {name}  {kind}, {f'by default {default}' if default else 'needed'}"
        yield from textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def parameters(model: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """Return the name, type, default (empty if it has none) and meaning of each parameter."""
    from slipway.meanings import meanings

    said = meanings(model)
    return [
        (name, _type(info), _default(info), said.get(name, "").replace("``", ""))
        for name, info in model.model_fields.items()
    ]


def values(model: type[BaseModel], name: str) -> tuple[str, ...]:
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
