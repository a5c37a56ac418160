"""Parameters of the quantize stage, and what follows from them and ``config.json`` alone.

That is: the models and levels that are refused, and the inputs that need no stored weights.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field, field_validator

from slipway.formats.registry import formats
from slipway.levels import LEVELS, QuantizationLevel, bits_of, widths_of
from slipway.model.configuration import ModelConfig
from slipway.model.families import Comparison
from slipway.settings.problems import did_you_mean
from slipway.settings.sections import LARGEST_SEED
from slipway.stage import StageParams
from slipway_quantize.experts import experts_refusal, mixture_of
from slipway_quantize.levels import CASTS, Bits, GroupSize, IntLevel, SizeBudget

_STORED_BYTES = 2
"""Bytes of a weight of most models."""
WITHOUT_BUDGET = "leave the size budget out, or use the ONNX format"
_CONV1D_MODELS = ("gpt2", "openai-gpt")
"""Types of models whose layers are ``Conv1D``, which compressed-tensors does not run."""


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
        description="names of linear layers (int8, int4), such as model.layers.0.mlp.down_proj, that keep their type: mixed precision; "
        "with ! in front, such as !linear_attn.in_proj_a, a layer is rounded that keeps its type by default",
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
    head_bits: Bits = Field(
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


def refusal_reason(params: QuantizeParams, config: ModelConfig) -> str:
    """Return why a model with this ``config.json`` is not quantized with these parameters; empty if it is."""
    level = LEVELS[params.level]
    if level.name in CASTS:
        return ""
    match params.format:
        case "pytorch":
            return _checkpoint_refusal(level, params, config)
        case "onnx" | "tensorrt" if level.activations:
            return _graph_refusal(level, params, config)
    return ""


def _checkpoint_refusal(level: QuantizationLevel, params: QuantizeParams, config: ModelConfig) -> str:
    family = config.family
    if family is None:
        return unknown_family_reason(config)
    if params.packed and (refused := experts_refusal(level, params.keep, config)):
        return refused
    early = (
        family.comparison in (Comparison.TEACHER_FORCED, Comparison.EMBEDDINGS)
        or config.get("model_type") in _CONV1D_MODELS
    )
    if not level.activations:
        sized = params.size_budget_bytes or params.size_budget_share
        mixed = sized and len(widths_of(level.name)) > 1 and params.packed
        return f"{size_budget_refusal(config.description)}: {WITHOUT_BUDGET}" if early and mixed else ""
    if early:
        return f"level {level.name} rounds activations, which transformers does not do in a {config.description}: use int8 or nvfp4"
    if not params.packed:
        return f"level {level.name} rounds activations, which dense weights do not: leave compress_weights true"
    return ""


def size_budget_refusal(model: str) -> str:
    """Return why a size budget is refused for a model that transformers unpacks while loading."""
    return f"a size budget gives weights different numbers of bits, and transformers unpacks all weights of this {model} with the same"


def _graph_refusal(level: QuantizationLevel, params: QuantizeParams, config: ModelConfig) -> str:
    family = config.family
    if not params.packed:
        return f"level {level.name} rounds activations, which dense weights do not: leave compress_weights true"
    if level.needs_text and (family is None or family.comparison is Comparison.TEACHER_FORCED):
        return f"level {level.name} needs the ranges of activations, and what a {config.description} computes on plain text is unknown: use int8_dynamic"
    return ""


def reads_deferred(params: QuantizeParams) -> tuple[str, ...]:
    """Return the inputs whose weights may be left out: the model, if it is read a few rows at a time and need not run."""
    return ("model",) if params.format in ("pytorch", "onnx") and params.level != "fp8_static" else ()


def most_parts(params: QuantizeParams, inputs: Collection[str], weight_bytes: int) -> int:
    """Return into how many parts a quantization can be divided: as many as it writes files, where each weight is rounded on its own."""
    level = LEVELS[params.level]
    by_weight = level.name in CASTS or params.integers is not None or level.name in ("fp8", "w8a8")
    # Text on which the result runs needs all of it, and a choice of bits compares all weights, unless a calibration has made it.
    budget = params.size_budget
    chosen = "calibration" in inputs and params.calibrated and not (budget and budget.is_asked)
    whole = "data" in inputs or (budget is not None and not chosen)
    if params.format != "pytorch" or not by_weight or whole:
        return 1
    written = weight_bytes if not params.packed else int(weight_bytes * level.bytes_per_weight / _STORED_BYTES)
    return -(-written // params.max_shard_bytes)


def calibration_refusal_reason(config: ModelConfig) -> str:
    """Return why a model with this ``config.json`` is not calibrated; empty if it is, or if only its weights can tell."""
    family = config.family
    if family is None:
        return unknown_family_reason(config)
    if family.takes_sound:
        return f"a model of family {family.name} is not calibrated: its inputs are sound"
    mixture = mixture_of(config) if config.mixes_experts else None
    if mixture is not None and mixture.transposed:
        return f"a {config.description} is not calibrated: the matrices of its experts are stored as (in, out)"
    return ""


def unknown_family_reason(config: ModelConfig) -> str:
    """Return why a model of unknown family is not quantized."""
    return f"the family of a {config.description} is unknown, so its layers are not quantized"
