"""The two verdicts on an output, its limits and their overrides, and the base of the plain data in reports.

The verdicts answer two questions: does the output compute what its own weights say, and how much of the fine-tune is left? They are
never mixed. *Faithful* is a question about the export: its yardstick is PyTorch on the weights that the output stores, and its limit
the noise of the arithmetic, measured on this model and text. *Fit* is a question about the level: its yardstick is the fine-tuned
model.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

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
WEAK_ELSEWHERE = NEAR / (1 - KEEPS_HALF)
"""As :data:`WEAK_EFFECT`, on text that the fine-tune was not made for: what rounding must cost there says nothing of what it was made for. At this
effect, both ways to judge have the same limit."""


class Value(BaseModel):
    """Frozen plain data; keys of a newer version are ignored, so an older reader can show a newer report."""

    model_config = ConfigDict(frozen=True, extra="ignore")


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


class Limits(Value):
    """Absolute limits for an output: those that ``validation.limits`` asks for, and those of its stored weights.

    All other limits follow from what was measured (``docs/verdicts.md``). None: not limited.

    Attributes:
        level: One of ``slipway.levels.STORED_TYPES``.
        max_abs_diff: Largest difference of a logit, as a share of the reference's logit scale.
        mean_kl: Largest mean KL, nats per token.
        top1_agreement: Smallest share of positions with the same first token.
        perplexity_ratio: Largest perplexity, as a multiple of the reference's.
        case_mean_kl: Largest mean KL of a shape case.
        adapter_strength_error: Largest difference between the adapter's strength and 1.
        cosine_distance: Largest mean distance of embeddings.
        relative_error: Largest relative error of values that are not logits.
        module_strength_error: Largest difference between the strength of an adapted module's update and 1 (``slipway.validation.survival``).
        module_weight_error: Largest distance of an adapted module's weight from base + update, relative to it.
        quality_loss: Largest loss of a score of the answers to test inputs, as a share, beside one changed answer.
    """

    level: str
    max_abs_diff: float | None = None
    mean_kl: float | None = None
    top1_agreement: float | None = None
    perplexity_ratio: float | None = None
    case_mean_kl: float | None = None
    adapter_strength_error: float | None = None
    cosine_distance: float | None = None
    relative_error: float | None = None
    module_strength_error: float | None = None
    module_weight_error: float | None = None
    quality_loss: float | None = None


class LimitOverrides(BaseModel):
    """Absolute limits for one level, judged as they are given; None adds none."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    max_abs_diff: float | None = Field(default=None, gt=0, description="share of the reference's logit scale")
    mean_kl: float | None = Field(default=None, gt=0, description="nats per token")
    top1_agreement: float | None = Field(default=None, ge=0, le=1, description="share of positions")
    perplexity_ratio: float | None = Field(default=None, ge=1)
    case_mean_kl: float | None = Field(default=None, gt=0, description="nats per token")
    adapter_strength_error: float | None = Field(default=None, gt=0, description="share of the adapter's effect")
    cosine_distance: float | None = Field(default=None, gt=0, description="1 - cos of two embeddings")
    relative_error: float | None = Field(default=None, gt=0, description="share of the reference's values")
    module_strength_error: float | None = Field(default=None, gt=0, description="share of a module's update")
    module_weight_error: float | None = Field(default=None, gt=0, description="share of a module's weight")
    quality_loss: float | None = Field(default=None, ge=0, le=1, description="share of the score")
