"""Parameters of the stage that chooses the text for calibration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.settings.sections import LARGEST_SEED
from slipway.stage import StageParams

TEXTS = "calibration.jsonl"
"""File with the chosen text: one JSON object with ``text`` a line."""


class CalibrationDataParams(StageParams):
    """Parameters of the stage that chooses the text for calibration."""

    tokens: int = Field(default=1 << 18, ge=1024, le=1 << 24, description="tokens to choose, at most")
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED, description="seed of the choice")
    source: Literal["given", "run"] = Field(
        default="given", description="who named the input calibration: the user, or nobody: the run brings it"
    )
    overlap: Literal["leave_out", "ignore"] = Field(
        default="leave_out",
        description="what to do with passages that are also in the held-out text: leave them out, or compare nothing",
    )
