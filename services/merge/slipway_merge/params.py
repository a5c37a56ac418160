"""Parameters of the stages merge and combine."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from slipway.stage import StageParams


class MergeParams(StageParams):
    """Parameters of the merge."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Data type of the merged weights; auto keeps each tensor's type in the base model"
    )
    max_shard_bytes: int = Field(
        default=5_000_000_000,
        ge=1 << 10,
        description="Largest weights file in bytes; a larger tensor gets its own file",
    )
    max_memory: int | None = Field(
        default=None, ge=1, description="Working memory in bytes; by default a quarter of the free memory"
    )
    save_tokenizer: bool = Field(default=True, description="Whether to copy tokenizer and chat template")
    verify: Literal["auto", "spot", "full"] = Field(
        default="auto",
        description="How to check the result: spot computes with rows of every merged weight; full also loads it with "
        "transformers and compares logits with base and adapter; auto is full for models up to 256 MB",
    )
    weights: Literal["stored", "deferred"] = Field(
        default="stored",
        description="deferred writes no merged weights and computes samples of them: the next stage makes them, from base "
        "and adapter; weights of a form that peft computes are written all the same",
    )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        """Refuse a check of files that are not written."""
        if self.weights == "deferred" and self.verify == "full":
            raise ValueError("verify full loads the written model: set weights to stored, or verify to spot")
        return self


class CombineParams(StageParams):
    """Parameters of the combination; names and meanings are those of peft's ``add_weighted_adapter``."""

    weights: tuple[float, ...] = Field(
        default=(), description="One factor per adapter, in the order of the inputs; by default 1 for each"
    )
    combination_type: Literal["cat", "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"] = Field(
        default="cat", description="cat is the exact sum; the others mix the factors and keep their rank"
    )
    density: float = Field(default=0.5, gt=0.0, le=1.0, description="Share of the values that pruning types keep")
    majority_sign_method: Literal["total", "frequency"] = Field(
        default="total", description="How the types with ties elect a sign"
    )
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="Seed for the types with dare, which prune at random")
