"""Read a model's numbers and its rotary embedding as fields of a checkpoint; refuse those that TensorRT-LLM cannot compute.

Source of the rotary fields: ``Attention.create_attention_const_params`` and ``RopeEmbeddingUtils`` of TensorRT-LLM 1.2, which
compute the angles from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipway.errors import TensorRTLLMExportError
from slipway.model.configuration import ModelConfig
from slipway.model.decoders.decoder import Decoder, decoder_of, kinds_of_layers, settings_of
from slipway.model.decoders.rotary import BASE, ORIGINAL, longrope_attention
from slipway.model.decoders.values import ConfigValues
from slipway.texts import quoted
from slipway_tensorrt_llm.models.table import KNOWN, Architecture, architecture_of
from slipway_tensorrt_llm.params import TensorRTLLMParams

VALUES = ConfigValues(TensorRTLLMExportError)
positive, flag = VALUES.positive, VALUES.flag

_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Model:
    """A model that TensorRT-LLM computes.

    Attributes:
        architecture: Its architecture.
        decoder: Its sizes.
        epsilon: Number that the norms add under the root.
        qkv_bias: Whether queries, keys and values have biases.
        dense_bias: Whether the matrix behind attention has one.
        mlp_bias: Whether the matrices of the MLP have some.
        norm_bias: Whether norms have biases.
        rope: Fields of the rotary embedding.
    """

    architecture: Architecture
    decoder: Decoder
    epsilon: float
    qkv_bias: bool
    dense_bias: bool
    mlp_bias: bool
    norm_bias: bool
    rope: Mapping[str, Any]


def model_of(config: ModelConfig) -> Model:
    """Return the model with this ``config.json``.

    Raises:
        TensorRTLLMExportError: ``FAMILY_UNSUPPORTED`` if TensorRT-LLM does not compute it, ``BASE_MODEL_INVALID``.
    """
    architecture = architecture_of(config.class_name)
    if architecture is None:
        raise unsupported_error(
            f"the model is {config.description}, and TensorRT-LLM checkpoints are written of {KNOWN}"
        )
    settings = settings_of(config, architecture.kind)
    for key, values in architecture.assumes.items():
        if settings.get(key) is not None and settings[key] not in values:
            expected = " or ".join(map(quoted, values)) or "no such setting"
            raise _assumption_error(architecture, key, settings[key], expected)
    decoder = decoder_of(config, VALUES, architecture.kind)
    if architecture.graph in ("phi3", "gpt") and decoder.width * decoder.heads != decoder.hidden:
        raise _assumption_error(
            architecture, "head_dim", decoder.width, f"heads that share the hidden size of {decoder.hidden}"
        )
    kinds, period = settings.get("layer_types"), architecture.kind.period
    windowed = architecture.qk_norms and period and settings.get("sliding_window") is not None
    if windowed and kinds not in (None, kinds_of_layers(architecture.kind, settings, VALUES, decoder.layers)):
        raise _assumption_error(architecture, "layer_types", kinds, f"full attention in every layer number {period}")
    gpt, bias = architecture.graph == "gpt", flag(settings, "attention_bias")
    return Model(
        architecture=architecture,
        decoder=decoder,
        epsilon=positive(settings, "layer_norm_epsilon" if gpt else "rms_norm_eps"),
        qkv_bias=gpt or bias or architecture.class_name == "Qwen2ForCausalLM",
        dense_bias=gpt or (bias and architecture.graph == "llama"),
        mlp_bias=gpt or (architecture.graph == "llama" and flag(settings, "mlp_bias")),
        norm_bias=gpt,
        rope=rope_fields(architecture, decoder),
    )


def check_division(model: Model, *, tp: int, pp: int) -> None:
    """Refuse a number of GPUs among which the model cannot be divided.

    Raises:
        TensorRTLLMExportError: ``FAMILY_UNSUPPORTED``.
    """
    architecture, decoder = model.architecture, model.decoder
    for what, count in (("attention heads", decoder.heads), ("values within an MLP", decoder.inner)):
        if count % tp:
            raise _division_error("tp", tp, f"the model's {count} {what} cannot be divided by it")
    if decoder.kv_heads % tp and tp % decoder.kv_heads:
        what = (
            f"the model's {decoder.kv_heads} heads of keys and values can neither be divided by it nor repeated evenly"
        )
        raise _division_error("tp", tp, what)
    if architecture.splits_embedding and decoder.vocabulary % tp:
        raise _division_error("tp", tp, f"the model's vocabulary of {decoder.vocabulary} cannot be divided by it")
    each, kv_each = decoder.heads // tp, max(1, decoder.kv_heads // tp)
    if architecture.qk_norms and each == kv_each > 1:
        # Attention.forward would read the joined matrix as if queries, keys and values of each head followed each other.
        what = (
            f"each GPU has {each} heads of queries and of keys, whose norms TensorRT-LLM 1.2 applies to the wrong rows"
        )
        raise _division_error("tp", tp, what)
    if pp > 1 and not architecture.pipelines:
        raise _division_error("pp", pp, f"TensorRT-LLM does not divide the layers of {architecture.class_name}")
    if decoder.layers % pp:
        raise _division_error("pp", pp, f"the model's {decoder.layers} layers cannot be divided by it")


def refusal_reason(params: TensorRTLLMParams, config: ModelConfig) -> str:
    """Return why no checkpoint can be written for this ``config.json`` and these parameters; an empty text if one can."""
    try:
        check_division(model_of(config), tp=params.tp, pp=params.pp)
    except TensorRTLLMExportError as error:
        return error.message if error.reason == "FAMILY_UNSUPPORTED" else ""
    return ""


def _division_error(name: str, value: int, why: str) -> TensorRTLLMExportError:
    return unsupported_error(f"{name} is {value}, and {why}", key=name)


def _assumption_error(architecture: Architecture, key: str, value: object, expected: str) -> TensorRTLLMExportError:
    what = f"{key} is {quoted(value)[:200]} in config.json, and TensorRT-LLM computes {architecture.class_name} with {expected}"
    return unsupported_error(what, key=key)


def unsupported_error(what: str, *, key: str = "") -> TensorRTLLMExportError:
    """Return the error for a model that TensorRT-LLM would compute wrong."""
    return TensorRTLLMExportError(
        what,
        reason="FAMILY_UNSUPPORTED",
        remedy="leave the format out: current releases of TensorRT-LLM load the pytorch folder",
        about={"key": key} if key else {},
    )


def rope_fields(found: Architecture, decoder: Decoder) -> dict[str, Any]:
    """Return the fields of the rotary embedding.

    Args:
        found: The model's architecture.
        decoder: The model.

    Raises:
        TensorRTLLMExportError: ``FAMILY_UNSUPPORTED`` for a rotation that the graph does not compute, ``BASE_MODEL_INVALID``.
    """
    if found.graph == "gpt":
        return {
            "position_embedding_type": "learned_absolute",
            "rotary_pct": 1.0,
            "rotary_base": BASE,
            "rotary_scaling": None,
        }
    rotary = decoder.rotary
    if rotary.local_kind != "default":
        raise unsupported_error(
            "config.json scales the rotation of layers with a sliding window, which no checkpoint says"
        )
    if rotary.share != 1.0 and found.graph != "phi3":
        raise _setting_error(found, "partial_rotary_factor", rotary.share)
    if rotary.rotated < 2 or rotary.rotated % 2 or rotary.rotated > decoder.width:
        raise _setting_error(found, "head_dim", decoder.width)
    fields: dict[str, Any] = {
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rotary.base,
        "rotary_scaling": None,
    }
    if found.graph == "phi3":
        fields["rotary_pct"] = rotary.share
    if found.kind.period and found.qk_norms:
        fields["rope_local_base_freq"] = rotary.local_base
    if rotary.kind == "default":
        return fields
    if rotary.kind not in found.rope:
        raise _setting_error(found, "rope_type", rotary.kind)
    return fields | _SCALINGS[rotary.kind](found, decoder)


def _linear(architecture: Architecture, decoder: Decoder) -> dict[str, Any]:
    del architecture
    return _scaling("linear", factor=decoder.rotary.factor())


def _yarn(architecture: Architecture, decoder: Decoder) -> dict[str, Any]:
    """Return the fields for YaRN; the graph computes the factor for attention itself, as the paper does."""
    rotary = decoder.rotary
    if other := rotary.beyond_yarn():
        raise _setting_error(architecture, *other)
    return _scaling(
        "yarn",
        factor=rotary.factor(),
        original_max_position_embeddings=rotary.original_length(decoder.positions),
        beta_fast=positive(rotary.parameters, "beta_fast", 32.0),
        beta_slow=positive(rotary.parameters, "beta_slow", 1.0),
    )


def _llama3(architecture: Architecture, decoder: Decoder) -> dict[str, Any]:
    del architecture
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    numbers = {key: positive(decoder.rotary.parameters, key) for key in keys}
    original = decoder.rotary.original_length(decoder.positions)
    return _scaling("llama3", **numbers, original_max_position_embeddings=original)


def _longrope(architecture: Architecture, decoder: Decoder) -> dict[str, Any]:
    """Return the factors for texts up to and beyond the original length; the graph computes attention's factor from the two lengths."""
    rotary = decoder.rotary
    original = rotary.original_length(decoder.positions)
    times = decoder.positions / original
    for key, wanted in (("factor", times), ("attention_factor", longrope_attention(times, original))):
        value = rotary.parameters.get(key)
        if value is not None and abs(positive(rotary.parameters, key) - wanted) > _TOLERANCE:
            raise _setting_error(architecture, key, value)
    return {
        "position_embedding_type": "long_rope",
        ORIGINAL: original,
        "longrope_scaling_short_factors": rotary.factors("short_factor"),
        "longrope_scaling_long_factors": rotary.factors("long_factor"),
    }


_SCALINGS: Mapping[str, Callable[[Architecture, Decoder], dict[str, Any]]] = {
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def _scaling(kind: str, **numbers: float) -> dict[str, Any]:
    """Return ``rotary_scaling``; older releases read its kind from ``type``."""
    return {"rotary_scaling": {"type": kind, "rope_type": kind, **numbers}}


def _setting_error(architecture: Architecture, key: str, value: object) -> Exception:
    return unsupported_error(
        f"{key} is {quoted(value)[:100]} in config.json, which TensorRT-LLM does not compute for {architecture.class_name}",
        key=key,
    )
