"""Parameters of the prepare stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.stage import StageParams


class PrepareParams(StageParams):
    """Parameters of the preparation."""

    merge_onto: Literal["original", "nf4"] = Field(
        default="original",
        description="What the adapter is merged onto: the weights as they are, or what NF4 with double quantization leaves of them",
    )
    save_tokenizer: bool = Field(default=True, description="whether tokenizer and chat template go along")
    max_shard_bytes: int = Field(
        default=5_000_000_000,
        ge=1 << 10,
        description="Largest weights file in bytes; a larger tensor has one of its own",
    )
