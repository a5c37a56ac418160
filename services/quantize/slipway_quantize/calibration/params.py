"""Parameters of the stages calibrate and importance."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.stage import StageParams
from slipway_quantize.levels import Bits, GroupSize


class CalibrateParams(StageParams):
    """Parameters of the calibrate stage."""

    bits: Bits = Field(default=4, description="bits of a weight")
    group_size: GroupSize = Field(default=32, description="weights per scale; a power of two")
    method: Literal["auto", "rtn", "awq", "gptq", "autoround"] = Field(
        default="auto",
        description="rtn needs no text, awq weights errors by the inputs' squares, gptq passes errors on to later weights, autoround "
        "also tunes rounding and scales by gradients, in ten times the time; auto takes what is best on held-out text of the others",
    )
    symmetric: bool = Field(default=True, description="grids without zero points")
    wide_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the weights that get 8 bits instead of fewer: those whose rounding costs the model's results the most",
    )
    head: bool = Field(default=True, description="round a decoder's lm_head too, and with it an embedding tied to it")
    time_budget_seconds: int = Field(
        default=600,
        ge=1,
        le=7 * 24 * 3600,
        description="time to plan for, on two cores at a nominal speed: a measured time would make the result depend on the machine's load",
    )
    threads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="threads that compute; sums depend on their number, so a worker does not choose it, and every run gives the same bits",
    )
    sensitivity: bool = Field(
        default=False,
        description="also measure the divergence that each weight adds on held-out text if it alone is rounded",
    )
    seed: int = Field(default=0, ge=0, lt=1 << 32, description="seed of the windows' choice and order")
    windows: int = Field(default=256, ge=8, le=1 << 16, description="most windows of text, held-out ones included")
    window_tokens: int = Field(default=128, ge=8, le=1 << 14, description="tokens of a window")


class ImportanceParams(StageParams):
    """Parameters of the importance stage."""

    windows: int = Field(default=64, ge=4, le=1 << 16, description="most windows of text")
    window_tokens: int = Field(default=128, ge=8, le=1 << 14, description="tokens of a window")
    seed: int = Field(default=0, ge=0, lt=1 << 32, description="seed of the windows' choice")
    threads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="threads that compute; sums depend on their number, so a worker does not choose it",
    )
