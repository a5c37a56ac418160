"""Parameters of the quantize stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from slipway.formats.registry import formats
from slipway.levels import LEVELS, bits_of, widths_of
from slipway.settings.problems import did_you_mean
from slipway.settings.sections import LARGEST_SEED
from slipway.stage import StageParams
from slipway_quantize.levels import GroupSize, IntLevel
from slipway_quantize.mixed.budget import SizeBudget


class QuantizeParams(StageParams):
    """Parameters of the quantize stage."""

    format: str = Field(description="name of the format of both the input and the output folder")
    level: str = Field(description="type of the weights: one of slipway.levels.LEVELS")
    group_size: GroupSize = Field(default=32, description="weights per scale (int8, int4); a power of two")
    packed: bool = Field(
        default=True,
        description="store integers and scales; false stores the same values as dense weights of the original type",
    )
    keep: tuple[str, ...] = Field(
        default=(),
        max_length=4096,
        description="names of linear layers (int8, int4), such as model.layers.0.mlp.down_proj, that keep their type: mixed precision",
    )
    accuracy_level: Literal[0, 1, 4] = Field(
        default=4,
        description="ONNX integer levels: type in which ONNX Runtime may compute products (1 float32, 4 int8, 0 its choice); "
        "on CPUs 8-bit weights at level 1 decode 60 times slower",
    )
    activation_ranges: Literal["auto", "minmax", "entropy", "percentile"] = Field(
        default="auto",
        description="int8_static: how ranges of activations are found on text; auto tries all on held-out windows",
    )
    smoothing: float = Field(
        default=0.75,
        ge=0,
        le=1,
        description="int8_static: share of the activations' outliers that move into the weights; 0: none",
    )
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED, description="seed of the choice of windows of text")
    size_budget_bytes: int = Field(
        default=0,
        ge=0,
        le=1 << 62,
        description="largest size of the weight files (int4): weights get 8 bits where it matters most; 0 sets none",
    )
    size_budget_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="the same as a share of the size that all weights have in 16 bits; 0 sets none",
    )
    wide_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="without a size budget and without a calibration: share of the layers' weights that get 8 bits instead of fewer, by the weights alone",
    )
    head_bits: Literal[3, 4, 8] = Field(
        default=8,
        description="fewest bits of the head and of the table of token embeddings; at 8, a checkpoint keeps a head that is tied to the table as it is",
    )
    external_data: bool = Field(
        default=True,
        description="graphs: store weights in a data file beside each graph; within the graph they may have 2 GB at most",
    )
    max_shard_bytes: int = Field(default=5 << 30, ge=1 << 20, description="largest safetensors file, bytes of data")
    calibrated: bool = Field(default=True, description="use the calibration, if there is one")
    check: bool = Field(default=True, description="load the result and run it once, if that fits into memory")

    @property
    def integers(self) -> IntLevel | None:
        """The integer level; None for fp16 and bf16."""
        bits = bits_of(self.level)
        return IntLevel(bits, self.group_size, self.packed, frozenset(self.keep)) if bits else None

    @property
    def size_budget(self) -> SizeBudget | None:
        """The budget within which weights get more bits; None if none is set, or if the level has only one width."""
        budget = SizeBudget(self.size_budget_bytes, self.size_budget_share, self.wide_share)
        return budget if (budget.is_asked or budget.wide) and len(widths_of(self.level)) > 1 else None

    @field_validator("format")
    @classmethod
    def _has_quantizer(cls, value: str) -> str:
        known = tuple(name for name, each in formats().items() if each.quantization.quantizer)
        if value not in known:
            raise ValueError(f"{value!r} is not a format that can be quantized here; {did_you_mean(value, known)}")
        return value

    @field_validator("level")
    @classmethod
    def _is_level(cls, value: str) -> str:
        if value not in LEVELS:
            raise ValueError(f"{value!r} is not a level of quantization; {did_you_mean(value, tuple(LEVELS))}")
        return value
