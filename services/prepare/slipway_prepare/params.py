"""Parameters of the stages prepare and convert."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.stage import StageParams


class PrepareParams(StageParams):
    """Parameters of the preparation."""

    merge_onto: Literal["original", "nf4"] = Field(
        default="original",
        description="Weights that the adapter is merged onto: original, or quantized to NF4 with double quantization and back",
    )
    model_type: str = Field(
        default="", description="Kind of the base, in transformers' words, if its config.json does not name it"
    )
    save_tokenizer: bool = Field(default=True, description="whether tokenizer and chat template go along")
    max_shard_bytes: int = Field(
        default=5_000_000_000,
        ge=1 << 10,
        description="Largest weights file in bytes; a larger tensor has one of its own",
    )


class ConvertParams(StageParams):
    """Parameters of the conversion."""

    file: str = Field(default="", description="The only file to convert; empty converts every model below the source")
    key: str = Field(default="", description="Entry of a pickle that holds the weights; empty finds the only one")
