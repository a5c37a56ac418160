"""Parameters of the stage answer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.stage import StageParams
from slipway.validation.questions import BASE, FINE_TUNED, MOST_CHARACTERS, MOST_TOKENS


class AnswerParams(StageParams):
    """What is asked, and of whom."""

    prompt: str = Field(min_length=1, max_length=MOST_CHARACTERS, description="the prompt")
    chat: bool = Field(default=True, description="whether the model's chat template is applied, if it has one")
    max_new_tokens: int = Field(default=64, ge=1, le=MOST_TOKENS, description="most tokens of each answer")
    models: tuple[Literal["base", "fine-tuned"], ...] = Field(
        default=(BASE, FINE_TUNED), description="which of base, and base + adapter, answer beside the outputs"
    )
    timeout_seconds: float = Field(default=1800.0, gt=0, description="longest time of one model")
    question: str = Field(
        default="", max_length=64, description="tells a question from an equal one before, so that it is answered anew"
    )
