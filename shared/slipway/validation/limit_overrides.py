"""Limits for the differences of an output, and overrides of the table of limits."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from slipway.validation.values import Value


class Limits(Value):
    """Limits for the differences of an output; the table in ``slipway_validate.judging.limits`` explains the figures.

    Attributes:
        level: Row of the table: one of ``slipway.levels.STORED_TYPES``.
        max_abs_diff: Largest difference of a logit, as a share of the reference's logit scale; None: not limited.
        mean_kl: Largest mean KL, nats per token.
        top1_agreement: Smallest share of positions with the same first token.
        perplexity_ratio: Largest perplexity, as a multiple of the reference's.
        case_mean_kl: Largest mean KL of a shape case; it has few positions, so the figure scatters more.
        adapter_strength_error: Largest difference between the adapter's strength and 1.
        cosine_distance: Largest mean distance of embeddings; None in reports of versions that compared none.
        relative_error: Largest relative error of values that are not logits; None as above.
        module_strength_error: Largest difference between the strength of an adapted module's update and 1 (``slipway.validation.survival``);
            None as above.
        module_weight_error: Largest distance of an adapted module's weight from base + update, relative to it; None as above.
        quality_loss: Largest loss of a score of the answers to test inputs, as a share, beside one changed answer; None as above.
    """

    level: str
    max_abs_diff: float | None
    mean_kl: float
    top1_agreement: float
    perplexity_ratio: float
    case_mean_kl: float
    adapter_strength_error: float
    cosine_distance: float | None = None
    relative_error: float | None = None
    module_strength_error: float | None = None
    module_weight_error: float | None = None
    quality_loss: float | None = None


class LimitOverrides(BaseModel):
    """Limits that replace those of the table for one level; None keeps the table's."""

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
