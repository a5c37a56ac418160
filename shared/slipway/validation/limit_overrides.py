"""Limits for the differences of an output, and overrides of the table of limits."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from slipway.validation.values import Value


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
