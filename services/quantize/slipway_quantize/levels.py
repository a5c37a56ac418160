"""The integer levels of weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from slipway.levels import LEVELS, QuantizationLevel, widths_of
from slipway.model.configuration import ModelConfig
from slipway.model.families import SPEECH, Comparison

CASTS = ("fp16", "bf16")
"""Levels at which every tensor of any model is cast."""
WIDE = 8
"""Bits of weights that matter too much for fewer."""
WITHOUT_BUDGET = "leave the size budget out, or use the ONNX format"
_TRANSPOSED = ("gpt2", "openai-gpt")
"""Types of models whose layers are ``Conv1D``, which compressed-tensors does not run."""


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"{value} is not a power of two; use 16, 32, 64, 128 or 256")
    return value


GroupSize = Annotated[int, Field(ge=16, le=256), AfterValidator(_power_of_two)]
"""Weights that share a scale, as a parameter of a stage."""


@dataclass(frozen=True, slots=True)
class IntLevel:
    """An integer level of the weights.

    Attributes:
        bits: 3, 4 or 8.
        group_size: Weights per scale.
        packed: Whether integers and scales are stored; if not, the same values as dense weights of the original type.
        keep: Names of linear layers that keep their type.
    """

    bits: int
    group_size: int
    packed: bool
    keep: frozenset[str] = frozenset()


def is_named(module: str, names: Collection[str]) -> bool:
    """Return whether a linear layer is among ``names``. One of two names may lack the prefix of the model's class."""
    return any(f".{module}".endswith(f".{name}") or f".{name}".endswith(f".{module}") for name in names)


def refusal_reason(params: Mapping[str, Any], config: ModelConfig) -> str:
    """Return why a model with this ``config.json`` is not quantized with these parameters; empty if it is."""
    level = LEVELS.get(str(params.get("level")))
    if level is None or level.name in CASTS:
        return ""
    match params.get("format"):
        case "pytorch":
            return _checkpoint_refusal(level, params, config)
        case "onnx" | "tensorrt" if level.activations:
            return _graph_refusal(level, params, config)
    return ""


def _checkpoint_refusal(level: QuantizationLevel, params: Mapping[str, Any], config: ModelConfig) -> str:
    family = config.family
    if family is None:
        return unknown_family_reason(config)
    early = (
        family.comparison in (Comparison.TEACHER_FORCED, Comparison.EMBEDDINGS)
        or config.get("model_type") in _TRANSPOSED
    )
    if not level.activations:
        sized = params.get("size_budget_bytes") or params.get("size_budget_share")
        mixed = sized and len(widths_of(level.name)) > 1 and params.get("packed") is not False
        return f"{size_budget_refusal(config.description)}: {WITHOUT_BUDGET}" if early and mixed else ""
    if early:
        return f"level {level.name} rounds activations, which transformers does not do in a {config.description}: use int8 or nvfp4"
    if params.get("packed") is False:
        return f"level {level.name} rounds activations, which dense weights do not: leave compress_weights true"
    return ""


def size_budget_refusal(model: str) -> str:
    """Return why a size budget is refused for a model that transformers unpacks while loading."""
    return f"a size budget gives weights different numbers of bits, and transformers unpacks all weights of this {model} with the same"


def _graph_refusal(level: QuantizationLevel, params: Mapping[str, Any], config: ModelConfig) -> str:
    family = config.family
    if params.get("packed") is False:
        return f"level {level.name} rounds activations, which dense weights do not: leave compress_weights true"
    if level.needs_text and (family is None or family.comparison is Comparison.TEACHER_FORCED):
        return f"level {level.name} needs the ranges of activations, and what a {config.description} computes on plain text is unknown: use int8_dynamic"
    return ""


def reads_deferred(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the inputs whose weights may be left out: the model, if it is read a few rows at a time and need not run."""
    return ("model",) if params.get("format") in ("pytorch", "onnx") and params.get("level") != "fp8_static" else ()


def calibration_refusal_reason(params: Mapping[str, Any], config: ModelConfig) -> str:  # noqa: ARG001 - of any level
    """Return why a model with this ``config.json`` is not calibrated; empty if it is, or if only its weights can tell."""
    family = config.family
    if family is None:
        return unknown_family_reason(config)
    return f"a model of family {family.name} is not calibrated: its inputs are sound" if family is SPEECH else ""


def unknown_family_reason(config: ModelConfig) -> str:
    """Return why a model of unknown family is not quantized."""
    return f"the family of a {config.description} is unknown, so its layers are not quantized"
