"""The rotary embedding as fields of a checkpoint.

Source: ``Attention.create_attention_const_params`` and ``RopeEmbeddingUtils`` of TensorRT-LLM 1.2, which compute the angles from these fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from slipway.texts import quoted
from slipway_tensorrt_llm.models.settings import invalid, positive, unsupported, whole
from slipway_tensorrt_llm.models.table import Architecture

_BASE = 10_000.0
_ORIGINAL = "original_max_position_embeddings"


def rope_fields(found: Architecture, settings: Mapping[str, Any], *, width: int, positions: int) -> dict[str, Any]:
    """Return the fields.

    Args:
        found: The model's architecture.
        settings: Its settings.
        width: Width of a head.
        positions: Most tokens of a text.

    Raises:
        TensorRTLLMExportError: ``FAMILY_UNSUPPORTED`` for a rotation that the graph does not compute, ``BASE_MODEL_INVALID``.
    """
    if found.kind == "gpt":
        return {
            "position_embedding_type": "learned_absolute",
            "rotary_pct": 1.0,
            "rotary_base": _BASE,
            "rotary_scaling": None,
        }
    full, local = _of_layers(settings)
    share = positive(full, "partial_rotary_factor", positive(settings, "partial_rotary_factor", 1.0))
    if share != 1.0 and found.kind != "phi3":
        raise _refused(found, "partial_rotary_factor", share)
    rotated = int(width * share)
    if rotated < 2 or rotated % 2 or rotated > width:
        raise _refused(found, "head_dim", width)
    fields: dict[str, Any] = {
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": positive(full, "rope_theta", positive(settings, "rope_theta", _BASE)),
        "rotary_scaling": None,
    }
    if found.kind == "phi3":
        fields["rotary_pct"] = share
    if found.period and found.qk_norms:
        fields["rope_local_base_freq"] = positive(
            local, "rope_theta", positive(settings, "rope_local_base_freq", _BASE)
        )
    kind = str(full.get("rope_type") or full.get("type") or "default")
    if kind == "default":
        return fields
    kind = "longrope" if kind == "su" else kind
    if kind not in found.rope:
        raise _refused(found, "rope_type", kind)
    return fields | _SCALINGS[kind](found, settings, full, rotated, positions)


def _of_layers(settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the parameters of layers with full attention, and of those with a sliding window."""
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise invalid("rope_parameters", given, "an object")
    full, local = given.get("full_attention"), given.get("sliding_attention")
    if not isinstance(full, Mapping):
        return given, {}
    if isinstance(local, Mapping) and (local.get("rope_type") or "default") != "default":
        raise unsupported("config.json scales the rotation of layers with a sliding window, which no checkpoint says")
    return full, local if isinstance(local, Mapping) else {}


Scaling = Callable[[Architecture, Mapping[str, Any], Mapping[str, Any], int, int], dict[str, Any]]


def _linear(
    found: Architecture, settings: Mapping[str, Any], given: Mapping[str, Any], rotated: int, positions: int
) -> dict[str, Any]:
    del found, settings, rotated, positions
    return _scaling("linear", factor=positive(given, "factor"))


def _yarn(
    found: Architecture, settings: Mapping[str, Any], given: Mapping[str, Any], rotated: int, positions: int
) -> dict[str, Any]:
    """Return YaRN, whose factor for attention the graph computes itself, as the paper does."""
    del rotated
    factor = positive(given, "factor")
    for key in ("mscale", "mscale_all_dim"):
        if given.get(key) is not None:
            raise _refused(found, key, given[key])
    if given.get("attention_factor") is not None:
        attention = positive(given, "attention_factor")
        if abs(attention - (0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0)) > 1e-4:
            raise _refused(found, "attention_factor", attention)
    if given.get("truncate") is False:
        raise _refused(found, "truncate", False)
    return _scaling(
        "yarn",
        factor=factor,
        original_max_position_embeddings=_original(settings, given, positions),
        beta_fast=positive(given, "beta_fast", 32.0),
        beta_slow=positive(given, "beta_slow", 1.0),
    )


def _llama3(
    found: Architecture, settings: Mapping[str, Any], given: Mapping[str, Any], rotated: int, positions: int
) -> dict[str, Any]:
    del found, rotated
    numbers = {key: positive(given, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    return _scaling("llama3", **numbers, original_max_position_embeddings=_original(settings, given, positions))


def _longrope(
    found: Architecture, settings: Mapping[str, Any], given: Mapping[str, Any], rotated: int, positions: int
) -> dict[str, Any]:
    """Return factors for texts below and beyond the original length; the graph computes the factor for attention from the two lengths."""
    original = _original(settings, given, positions)
    times = positions / original
    for key in ("factor", "attention_factor"):
        wanted = (
            times if key == "factor" else math.sqrt(1 + math.log(times) / math.log(original)) if times > 1.0 else 1.0
        )
        if given.get(key) is not None and abs(positive(given, key) - wanted) > 1e-4:
            raise _refused(found, key, given[key])
    fields: dict[str, Any] = {"position_embedding_type": "long_rope", _ORIGINAL: original}
    for key, target in (
        ("short_factor", "longrope_scaling_short_factors"),
        ("long_factor", "longrope_scaling_long_factors"),
    ):
        factors = given.get(key)
        if not isinstance(factors, list) or len(factors) != rotated // 2:
            raise invalid(key, factors, f"a list of {rotated // 2} numbers")
        fields[target] = [positive({key: one}, key) for one in factors]
    return fields


_SCALINGS: Mapping[str, Scaling] = {"linear": _linear, "yarn": _yarn, "llama3": _llama3, "longrope": _longrope}


def _scaling(kind: str, **numbers: float) -> dict[str, Any]:
    """Return ``rotary_scaling``, whose kind older releases read as ``type``."""
    return {"rotary_scaling": {"type": kind, "rope_type": kind, **numbers}}


def _original(settings: Mapping[str, Any], given: Mapping[str, Any], positions: int) -> int:
    of = given if given.get(_ORIGINAL) is not None else settings
    value = whole(of, _ORIGINAL, default=positions)
    if value < 2:
        raise invalid(_ORIGINAL, value, "a length of at least 2 tokens")
    return value


def _refused(found: Architecture, key: str, value: object) -> Exception:
    return unsupported(
        f"{key} is {quoted(value)[:100]} in config.json, which TensorRT-LLM does not compute for {found.model_class}",
        key=key,
    )
