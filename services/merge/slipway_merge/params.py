"""Parameters of the merge stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.stage import StageParams


class MergeParams(StageParams):
    """Parameters of the merge."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Data type of the merged weights; auto keeps each tensor's type in the base model"
    )
    max_shard_bytes: int = Field(
        default=5_000_000_000,
        ge=1 << 10,
        description="Largest weights file in bytes; a larger tensor has one of its own",
    )
    max_memory: int | None = Field(
        default=None, ge=1, description="Bytes to work in; by default a quarter of the memory that is free"
    )
    save_tokenizer: bool = Field(default=True, description="Whether tokenizer and chat template go along")
    verify: Literal["auto", "spot", "full"] = Field(
        default="auto",
        description="How the result is checked: spot computes with rows of every merged weight; full has transformers load "
        "it and compares logits with base and adapter too; auto is full for models up to 256 MB",
    )
