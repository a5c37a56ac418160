"""Values that settings take: levels, sizes, texts and lists, checked as they come in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from slipway.configuration.problems import did_you_mean
from slipway.texts import hidden_character, quoted
from slipway.validation.limits import LIMIT_LEVELS, LimitOverrides

Level = Literal["fp16", "bf16", "int8", "int4"]
LEVELS: tuple[str, ...] = get_args(Level)
FORMAT_LEVELS: Mapping[str, tuple[str, ...]] = {
    "pytorch": ("fp16", "bf16", "int8", "int4"),
    "onnx": ("fp16", "int8", "int4"),
}
"""Quantization levels each format can be delivered at."""

GROUP_SIZES = (16, 32, 64, 128, 256)

STAGES = ("combine", "merge", "onnx_export", "prepare", "quantize", "tensorrt_build", "validate")
"""Stages an export may consist of. They need not be installed where it is asked for."""


def _levels(value: Any) -> Any:
    """One level or a list of them as a tuple without repetitions; ``none`` adds nothing, as unquantized always comes."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple):
        return value
    unknown = [level for level in value if level not in (*LEVELS, "none")]
    if unknown:
        raise PydanticCustomError(
            "level",
            "{found} is not a quantization level",
            {"found": quoted(unknown[0]), "remedy": f"use none, {', '.join(LEVELS)}"},
        )
    return tuple(dict.fromkeys(level for level in value if level != "none"))


def by_stage(value: Any) -> Any:
    """Values by stage, as they are; a name that is no stage's is refused."""
    for name in value if isinstance(value, Mapping) else ():
        _refuse_unknown(name, STAGES, kind="stage")
    return value


def by_level(value: Any) -> Any:
    """Limits by level, as they are; a name that is no level's or no limit's is refused."""
    rows = value if isinstance(value, Mapping) else {}
    for level, row in rows.items():
        _refuse_unknown(level, LIMIT_LEVELS, kind="level")
        for name in row if isinstance(row, Mapping) else ():
            _refuse_unknown(name, tuple(LimitOverrides.model_fields), kind="limit")
    return value


def _refuse_unknown(name: Any, known: tuple[str, ...], *, kind: str) -> None:
    if name not in known:
        remedy = did_you_mean(str(name), known)
        raise PydanticCustomError(
            kind, "{found} is not a {kind}", {"found": quoted(name), "kind": kind, "remedy": remedy}
        )


def as_tuple(value: Any) -> Any:
    """Make a list, as YAML has them, a tuple."""
    return tuple(value) if isinstance(value, list) else value


def lower_case(value: Any) -> Any:
    """Write a text in lower case."""
    return value.lower() if isinstance(value, str) else value


def _plain_text(value: str) -> str:
    """A text as it is; one that a terminal would obey, that hides something, or that no request takes is refused."""
    hidden = hidden_character(value)
    if hidden:
        raise PydanticCustomError(
            "text",
            "{found} has the character {hidden}, which is not shown as it is",
            {"found": quoted(value), "hidden": hidden, "remedy": "rename what it names, without that character"},
        )
    size = len(value.encode())
    if size > TEXT_BYTES:
        raise PydanticCustomError(
            "text",
            "{found} has {size} bytes",
            {"found": quoted(value), "size": size, "remedy": f"use {TEXT_BYTES} at most"},
        )
    return value


TEXT_BYTES = 4096
"""Length of a text, as of one in a request."""

LARGEST = 2**31 - 1
"""Of a number that travels in 32 bits."""
LARGEST_BYTES = 2**62
LARGEST_SEED = 2**53 - 1
"""Parameters of a stage travel as doubles."""

Text = Annotated[str, AfterValidator(_plain_text)]
Levels = Annotated[tuple[Level, ...], BeforeValidator(_levels)]
Seconds = Annotated[int, Field(ge=1, le=LARGEST)]
