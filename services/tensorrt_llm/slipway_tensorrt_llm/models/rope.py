"""The rotary embedding as fields of a checkpoint.

Source: ``Attention.create_attention_const_params`` and ``RopeEmbeddingUtils`` of TensorRT-LLM 1.2, which compute the angles from these fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipway.model.decoders.decoder import Decoder
from slipway.model.decoders.rotary import BASE, ORIGINAL, longrope_attention
from slipway.texts import quoted
from slipway_tensorrt_llm.models.settings import positive, unsupported
from slipway_tensorrt_llm.models.table import Architecture

_TOLERANCE = 1e-4


def rope_fields(found: Architecture, decoder: Decoder) -> dict[str, Any]:
    """Return the fields.

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
        raise unsupported("config.json scales the rotation of layers with a sliding window, which no checkpoint says")
    if rotary.share != 1.0 and found.graph != "phi3":
        raise _refused(found, "partial_rotary_factor", rotary.share)
    if rotary.rotated < 2 or rotary.rotated % 2 or rotary.rotated > decoder.width:
        raise _refused(found, "head_dim", decoder.width)
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
        raise _refused(found, "rope_type", rotary.kind)
    return fields | _SCALINGS[rotary.kind](found, decoder)


def _linear(found: Architecture, decoder: Decoder) -> dict[str, Any]:
    del found
    return _scaling("linear", factor=decoder.rotary.factor())


def _yarn(found: Architecture, decoder: Decoder) -> dict[str, Any]:
    """Return YaRN, whose factor for attention the graph computes itself, as the paper does."""
    rotary = decoder.rotary
    if other := rotary.beyond_yarn():
        raise _refused(found, *other)
    return _scaling(
        "yarn",
        factor=rotary.factor(),
        original_max_position_embeddings=rotary.original_length(decoder.positions),
        beta_fast=positive(rotary.parameters, "beta_fast", 32.0),
        beta_slow=positive(rotary.parameters, "beta_slow", 1.0),
    )


def _llama3(found: Architecture, decoder: Decoder) -> dict[str, Any]:
    del found
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    numbers = {key: positive(decoder.rotary.parameters, key) for key in keys}
    original = decoder.rotary.original_length(decoder.positions)
    return _scaling("llama3", **numbers, original_max_position_embeddings=original)


def _longrope(found: Architecture, decoder: Decoder) -> dict[str, Any]:
    """Return factors for texts below and beyond the original length; the graph computes the factor for attention from the two lengths."""
    rotary = decoder.rotary
    original = rotary.original_length(decoder.positions)
    times = decoder.positions / original
    for key, wanted in (("factor", times), ("attention_factor", longrope_attention(times, original))):
        given = rotary.parameters.get(key)
        if given is not None and abs(positive(rotary.parameters, key) - wanted) > _TOLERANCE:
            raise _refused(found, key, given)
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
    """Return ``rotary_scaling``, whose kind older releases read as ``type``."""
    return {"rotary_scaling": {"type": kind, "rope_type": kind, **numbers}}


def _refused(found: Architecture, key: str, value: object) -> Exception:
    return unsupported(
        f"{key} is {quoted(value)[:100]} in config.json, which TensorRT-LLM does not compute for {found.class_name}",
        key=key,
    )
