"""Parameters of the executorch stage, and the names of its files."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from slipway.stage import StageParams

PRODUCT = "ExecuTorch program"
"""What the format makes, in messages."""

LEVEL = "8da4w"
"""8-bit activations, rounded at run time, and 4-bit weights."""
GROUP_SIZES = (32, 64, 128, 256)
"""Numbers of weights that may share a scale: XNNPACK's kernels take multiples of 32."""

PROGRAM, DESCRIPTION = "model.pte", "executorch.json"


class ExecutorchParams(StageParams):
    """Parameters of the executorch stage."""

    level: Literal["none", "8da4w"] = Field(
        default="none",
        description="none keeps float32; 8da4w rounds linear weights to 4 bits and their inputs to 8 bits",
    )
    group_size: int = Field(default=32, description="weights in a row that share one scale: 32, 64, 128 or 256")
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
    def _combinations(self) -> Self:
        if self.level == LEVEL and self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size {self.group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
        return self
