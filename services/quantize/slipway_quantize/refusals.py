"""The models and levels that are not quantized, known from parameters and ``config.json`` alone, and the inputs that need no stored weights."""

from __future__ import annotations

from slipway.levels import LEVELS, QuantizationLevel, widths_of
from slipway.model.configuration import ModelConfig
from slipway.model.families import SPEECH, Comparison
from slipway_quantize.levels import CASTS
from slipway_quantize.params import QuantizeParams

WITHOUT_BUDGET = "leave the size budget out, or use the ONNX format"
_TRANSPOSED = ("gpt2", "openai-gpt")
"""Types of models whose layers are ``Conv1D``, which compressed-tensors does not run."""


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
    early = (
        family.comparison in (Comparison.TEACHER_FORCED, Comparison.EMBEDDINGS)
        or config.get("model_type") in _TRANSPOSED
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


def calibration_refusal_reason(config: ModelConfig) -> str:
    """Return why a model with this ``config.json`` is not calibrated; empty if it is, or if only its weights can tell."""
    family = config.family
    if family is None:
        return unknown_family_reason(config)
    return f"a model of family {family.name} is not calibrated: its inputs are sound" if family is SPEECH else ""


def unknown_family_reason(config: ModelConfig) -> str:
    """Return why a model of unknown family is not quantized."""
    return f"the family of a {config.description} is unknown, so its layers are not quantized"
