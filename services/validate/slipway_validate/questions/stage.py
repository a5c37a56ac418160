"""The stage behind the console's questions: several models answer one prompt. No export plans it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Role, Stage
from slipway_validate.questions.params import AnswerParams


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
