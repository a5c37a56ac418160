"""Parameters of the stages gguf and gguf_adapter, and the levels: the types in which llama.cpp stores weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field, field_validator

from slipway.settings.problems import did_you_mean
from slipway.stage import StageParams
from slipway.texts import file_name

UNQUANTIZED = "f16"
"""Level of the unquantized output."""

_BLOCKS = {"F32": "", "F16": "float16", "BF16": "bfloat16", "Q8_0": "int8/32", "Q4_0": "int8/32"}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
MODEL = "model"
"""Name of a model that has none."""


@dataclass(frozen=True, slots=True)
class Level:
    """A level.

    Attributes:
        name: Name in configurations, and the end of an output's name.
        type: ggml's type of most weights, as :class:`gguf.GGMLQuantizationType` names it.
        file_type: Value of ``general.file_type``, as :class:`gguf.LlamaFileType` names it.
        precision: Row of validation's table of limits.
        bytes_per_weight: Upper estimate of a file's size: blocks that do not fit a row are replaced by wider ones.
    """

    name: str
    type: str
    file_type: str
    precision: str
    bytes_per_weight: float

    @property
    def weighs(self) -> bool:
        """Whether the importance of inputs can weight the rounding; only types that choose scales by the error can use it."""
        return self.type not in ("F32", "F16", "BF16", "Q8_0")

    @property
    def label(self) -> str:
        """The level as it appears in names of GGUF files, such as ``Q4_K_M``."""
        return self.name.upper()


LEVELS: Mapping[str, Level] = {
    each.name: each
    for each in (
        Level("f32", "F32", "ALL_F32", "float32", 4.0),
        Level(UNQUANTIZED, "F16", "MOSTLY_F16", "float16", 2.0),
        Level("bf16", "BF16", "MOSTLY_BF16", "bfloat16", 2.0),
        Level("q8_0", "Q8_0", "MOSTLY_Q8_0", "int8", 1.07),
        Level("q6_k", "Q6_K", "MOSTLY_Q6_K", "int8", 1.07),
        Level("q5_k_m", "Q5_K", "MOSTLY_Q5_K_M", "int4", 0.95),
        Level("q4_k_m", "Q4_K", "MOSTLY_Q4_K_M", "int4", 0.9),
        Level("q4_0", "Q4_0", "MOSTLY_Q4_0", "int4", 0.85),
        Level("iq4_xs", "IQ4_XS", "MOSTLY_IQ4_XS", "int4", 0.85),
    )
}
"""Levels by name, the widest first. The format delivers all but ``f32``, which takes twice the bytes that the values need."""
INPUT_ROUNDINGS: Mapping[str, str] = {
    "": _BLOCKS["F16"],
    **{name: _BLOCKS.get(level.type, "int8/256") for name, level in LEVELS.items()},
}
"""How llama.cpp rounds the inputs of a product on the CPU: to the type that ``type_traits_cpu`` of ggml names for each type of weights
(``vec_dot_type``: F16, BF16, Q8_0 in blocks of 32, Q8_K in blocks of 256)."""


class NamedParams(StageParams):
    """Parameters with the names that a file's name and metadata contain."""

    name: str = Field(default=MODEL, description="name of the model, with which the file's name begins")
    base_model: str = Field(
        default="",
        max_length=200,
        description="repository of the base model, such as Qwen/Qwen3-0.6B; empty if it is not known",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not safe as a file name; write, for example, {file_name(value) or MODEL}")
        return value


class GGUFParams(NamedParams):
    """Parameters of the gguf stage."""

    type: str = Field(default=UNQUANTIZED, description=f"type of most weights: {', '.join(LEVELS)}")

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value not in LEVELS:
            raise ValueError(f"{value!r} is not a type of weights; {did_you_mean(value, tuple(LEVELS))}")
        return value


class AdapterParams(NamedParams):
    """Parameters of the gguf_adapter stage: the names of the model and its base, as in the gguf stage."""
