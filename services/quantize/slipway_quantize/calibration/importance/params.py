"""Parameters of the importance stage."""

from __future__ import annotations

from pydantic import Field

from slipway.stage import StageParams


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
