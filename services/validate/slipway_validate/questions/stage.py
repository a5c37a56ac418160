"""The stage behind the console's questions: several models answer one prompt. No export plans it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from slipway.stage import Context, Role, Stage, StageParams
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


def run(inputs: Mapping[str, Path], params: AnswerParams, ctx: Context) -> dict[str, Path]:
    """Let the models answer, one after the other. One that cannot answer says why, and the others answer all the same.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the base, the tokenizer or the prompt cannot be used. ``FAMILY_UNSUPPORTED``: models of
            this family write no text, or read more than text.
        StageError: ``CANCELLED``; ``DISK_FULL``.
    """
    from slipway_validate.questions.answering import answer_prompt

    return {"answers": answer_prompt(inputs, params, ctx)}


STAGE = Stage(
    name="answer",
    version=1,
    inputs=("base",),
    optional_inputs=("adapter",),
    outputs=("answers",),
    params=AnswerParams,
    run=run,
    libraries=("torch", "transformers", "peft"),
    more_inputs=True,
    role=Role.ANSWERING,
)
