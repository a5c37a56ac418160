"""Parameters of the tensorrt_build stage, the levels of engines, and the GPU architectures that compute in their types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from slipway.stage import StageParams

TARGET = re.compile(r"sm[1-9][0-9]{1,2}")
"""Name of a GPU architecture: its compute capability without the dot."""

LEVELS = ("fp16", "bf16", "int8_static", "fp8_static")
"""TensorRT takes all types from the graph, which the quantize stage writes at these levels."""

LEAST_ARCHITECTURES: Mapping[str, int] = {"bf16": 80, "fp8_static": 89}
"""The first compute capability, without the dot, whose GPUs have the type of a level."""

FITTED_TO_TEXT = ("int8_static", "fp8_static")
"""Levels whose graphs hold ranges of activations, which belong to one merge."""


class Range(BaseModel):
    """Smallest, typical and largest size of an axis; the engine is tuned for ``opt``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    min: int = Field(ge=0)
    opt: int = Field(ge=0)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"min {self.min}, opt {self.opt}, max {self.max} must not decrease")
        return self


class TensorRTBuildParams(StageParams):
    """Parameters of the tensorrt_build stage."""

    builder: Literal["auto", "tensorrt", "tensorrt_rtx"] = Field(
        default="auto",
        description="tensorrt builds on and for this machine's GPU; tensorrt_rtx builds ahead of time for named targets; "
        "auto takes tensorrt if it can run",
    )
    targets: tuple[str, ...] = Field(
        default=(), description="GPU architectures, for example sm89; by default that of this machine's GPU"
    )
    batch: Range = Field(default=Range(min=1, opt=1, max=4), description="rows the engine is optimized for")
    sequence: Range = Field(
        default=Range(min=1, opt=64, max=512),
        description="new tokens per row and call that the engine is optimized for",
    )
    past: Range = Field(
        default=Range(min=0, opt=512, max=2048),
        description="tokens already in the KV cache that the engine is optimized for",
    )
    # Left out where it changes nothing, so that engines keep the action key that they had without it.
    workspace_bytes: int = Field(
        default=0,
        ge=0,
        exclude_if=lambda value: value == 0,
        description="most memory of the GPU that a layer may use beside its inputs and results; 0 for all that the GPU has",
    )
    refit: bool = Field(
        default=False,
        description="build engines that take the weights of another merge of the same graph, and refit one that is kept on the machine "
        "instead of building; needs the GPU",
    )

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for target in value:
            if not TARGET.fullmatch(target):
                raise ValueError(
                    f"{target!r} is not a GPU architecture; write, for example, sm89 for compute capability 8.9"
                )
        return tuple(dict.fromkeys(value))

    @field_validator("batch", "sequence")
    @classmethod
    def _check_positive(cls, value: Range) -> Range:
        if value.min < 1:
            raise ValueError("batch and sequence need at least one element: set min to 1 or more")
        return value


def find_unable(level: str, targets: Iterable[str]) -> list[str]:
    """Return the targets (``sm75``) whose GPUs lack the type of a level."""
    least = LEAST_ARCHITECTURES.get(level, 0)
    return [target for target in targets if int(target.removeprefix("sm")) < least]
