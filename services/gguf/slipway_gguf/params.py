"""Parameters of the gguf stage."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from slipway.settings.problems import did_you_mean
from slipway.stage import StageParams
from slipway.texts import file_name
from slipway_gguf.levels import LEVELS, UNQUANTIZED

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
MODEL = "model"
"""Name of a model that has none."""


class NamedParams(StageParams):
    """Names that a file begins with and holds."""

    name: str = Field(default=MODEL, description="name of the model, with which the file's name begins")
    base_model: str = Field(
        default="",
        max_length=200,
        description="repository of the base model, such as Qwen/Qwen3-0.6B; empty if it is not known",
    )

    @field_validator("name")
    @classmethod
    def _safe(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not safe as a file name; write, for example, {file_name(value) or MODEL}")
        return value


class GGUFParams(NamedParams):
    """Parameters of the gguf stage."""

    type: str = Field(default=UNQUANTIZED, description=f"type of most weights: {', '.join(LEVELS)}")

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in LEVELS:
            raise ValueError(f"{value!r} is not a type of weights; {did_you_mean(value, tuple(LEVELS))}")
        return value


class AdapterParams(NamedParams):
    """Parameters of the gguf_adapter stage: the names of the model and its base, as in the gguf stage."""
