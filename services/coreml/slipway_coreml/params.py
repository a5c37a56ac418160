"""Parameters of the coreml stage."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from slipway.stage import StageParams

PRODUCT = "Core ML package"
"""What the format makes, in messages."""

Level = Literal["none", "int8", "int4"]
Precision = Literal["float16", "float32"]


class CoremlParams(StageParams):
    """Parameters of the coreml stage."""

    level: Level = Field(
        default="none",
        description="none stores weights in the compute precision; int8 has a scale for each row of a matrix, int4 one for each group of weights in a row",
    )
    precision: Precision = Field(default="float16", description="type in which the program computes")
    group_size: int = Field(
        default=32, ge=16, le=256, description="weights in a row that share one scale at int4: a power of two"
    )
    max_length: int = Field(
        default=1024,
        ge=2,
        le=1 << 20,
        description="most tokens of a text: the size of a decoder's KV cache. A model of fewer positions takes as many as it has",
    )
    call_length: int = Field(
        default=128,
        ge=2,
        le=1 << 20,
        description="most tokens that a decoder takes in one call; longer prompts take several calls",
    )

    @model_validator(mode="after")
    def _power_of_two(self) -> Self:
        if self.group_size & (self.group_size - 1):
            raise ValueError(f"group_size {self.group_size} is not a power of two")
        return self
