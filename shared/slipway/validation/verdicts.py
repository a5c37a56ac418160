"""The two verdicts on an output: does it compute what its own weights say, and how much of the fine-tune is left?

They are never mixed. *Faithful* is a question about the export: its yardstick is PyTorch on the weights that the output stores, and its limit the
noise of the arithmetic, measured on this model and text. *Fit* is a question about the level: its yardstick is the fine-tuned model.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from slipway.validation.values import Value

Question = Literal["faithful", "fit"]

KEEPS_ENOUGH = 0.85
"""Share of the fine-tune from which an output passes."""
KEEPS_HALF = 0.5
"""Share from which it passes with a warning; below, most of the fine-tune is lost."""
WEAK_EFFECT = 0.1
"""Divergence of base and reference, nats per token, below which noise that has nothing to do with the fine-tune outweighs it."""
CLOSE, NEAR = 0.1, 0.35
"""Divergence from the reference, nats per token, up to which an output passes, and passes with a warning, where no fine-tune can be measured.

A divergence of 0.1 raises the perplexity by about a tenth."""


class Answer(StrEnum):
    """The answer to one of the questions."""

    PASSED = "passed"
    WARNING = "warning"
    FAILED = "failed"
    NOT_JUDGED = "not_judged"


class Verdict(Value):
    """The answer to one question about an output.

    Attributes:
        answer: The answer.
        said: One sentence with the figures it rests on.
        yardstick: What the output was compared with: ``stored weights``, ``merged model`` or ``reference``; empty if with nothing.
    """

    answer: Answer = Answer.NOT_JUDGED
    said: str = ""
    yardstick: Literal["", "stored weights", "merged model", "reference"] = ""


def kept_share(divergence: float | None, effect: float | None) -> float | None:
    """Return the share of the fine-tune that is left: 1 - KL(reference, output) / KL(reference, base), never below 0.

    Args:
        divergence: Distance of the output from the reference.
        effect: Distance of the base from the reference; None without an adapter.
    """
    if divergence is None or not effect:
        return None
    return max(0.0, 1.0 - divergence / effect)
