"""The rotary embedding: its base, and the scaling for long texts, as keys and tensors that llama.cpp reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from slipway.texts import quoted
from slipway_gguf.architectures.settings import invalid, number, optional_number, positive, unsupported, whole
from slipway_gguf.architectures.table import Architecture
from slipway_gguf.metadata import Field

_KIND = gguf.GGUFValueType
_DEFAULT_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model.

    Attributes:
        fields: Keys of the metadata.
        tensors: Factors of its frequencies, by the name of the tensor. (width / 2,)
    """

    fields: tuple[Field, ...] = ()
    tensors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def rope_of(found: Architecture, settings: Mapping[str, Any], width: int) -> Rope:
    """Return the rotary embedding.

    Args:
        found: The architecture.
        settings: The model's settings.
        width: Width of a head.

    Raises:
        GGUFExportError: ``FAMILY_UNSUPPORTED`` for a scaling that llama.cpp does not compute for this architecture.
    """
    if not found.rope:
        return Rope()
    whole_layers, local_base = _parameters(settings)
    base = positive(whole_layers, "rope_theta", positive(settings, "rope_theta", _DEFAULT_BASE))
    share = number(whole_layers, "partial_rotary_factor", number(settings, "partial_rotary_factor", 1.0))
    rotated = int(width * share)
    if share != 1.0 and found.name != "phi3":
        raise unsupported("partial_rotary_factor", share, found)
    if rotated < 2 or rotated % 2:
        raise unsupported("head_dim", width, found)
    fields = [
        Field(f"{found.name}.rope.dimension_count", rotated, _KIND.UINT32),
        Field(f"{found.name}.rope.freq_base", base, _KIND.FLOAT32),
    ]
    if found.windows and found.name == "gemma3":
        local = local_base or positive(settings, "rope_local_base_freq", _DEFAULT_BASE)
        fields.append(Field(f"{found.name}.rope.freq_base_swa", local, _KIND.FLOAT32))
    if found.name == "phi3":  # also without scaling
        length = _original_length(settings, whole_layers)
        fields.append(Field(f"{found.name}.rope.scaling.original_context_length", length, _KIND.UINT32))
    kind = str(whole_layers.get("rope_type") or whole_layers.get("type") or "default")
    if kind == "default":
        return Rope(tuple(fields))
    kind = "longrope" if kind == "su" else kind
    if kind not in found.rope:
        raise unsupported("rope_type", kind, found)
    scaled = _SCALINGS[kind](found, settings, whole_layers, rotated, base)
    return Rope((*fields, *scaled.fields), scaled.tensors)


def _parameters(settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """Return the parameters of layers with full attention, and the base of those with a sliding window; 0 if it has no place of its own."""
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        return {}, 0.0
    full, local = given.get("full_attention"), given.get("sliding_attention")
    if isinstance(full, Mapping):
        return full, positive(local, "rope_theta", 0.0) if isinstance(local, Mapping) else 0.0
    return given, 0.0


def _linear(
    found: Architecture, settings: Mapping[str, Any], given: Mapping[str, Any], rotated: int, base: float
) -> Rope:
    del settings, rotated, base
    return Rope((*_scaling(found, "linear"), _float(found, "rope.scaling.factor", positive(given, "factor"))))


def _yarn(
    found: Architecture, settings: Mapping[str, Any], given: Mapping[str, Any], rotated: int, base: float
) -> Rope:
    """Return YaRN, whose factor for attention llama.cpp computes itself, as the paper does."""
    del rotated, base
    factor = positive(given, "factor")
    for key in ("mscale", "mscale_all_dim"):
        if given.get(key) is not None:
            raise unsupported(key, given[key], found)
    attention = optional_number(given, "attention_factor")
    if attention is not None and abs(attention - (0.1 * math.log(factor) + 1.0)) > 1e-4:
        raise unsupported("attention_factor", attention, found)
    if given.get("truncate") is False:
        raise unsupported("truncate", False, found)
    original = _original_length(settings, given)
    fields = [
        *_scaling(found, "yarn"),
        _float(found, "rope.scaling.factor", factor),
        Field(f"{found.name}.rope.scaling.original_context_length", original, _KIND.UINT32),
    ]
    for key in ("beta_fast", "beta_slow"):
        value = optional_number(given, key)
        if value is not None:
            fields.append(_float(found, f"rope.scaling.yarn_{key}", value))
    return Rope(tuple(fields))


def _llama3(
    found: Architecture, settings: Mapping[str, Any], given: Mapping[str, Any], rotated: int, base: float
) -> Rope:
    """Return the divisors of the frequencies as a tensor: low frequencies are divided, high ones kept, those between blended."""
    del found
    factor, low, high = (positive(given, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _original_length(settings, given)
    lengths = 2 * math.pi * base ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)  # (rotated / 2,)
    blend = np.clip((original / lengths - low) / (high - low) if high != low else 0.0, 0.0, 1.0)
    divisors = 1.0 / ((1.0 - blend) / factor + blend)
    return Rope((), {"rope_freqs.weight": divisors.astype(np.float32)})


def _longrope(
    found: Architecture, settings: Mapping[str, Any], given: Mapping[str, Any], rotated: int, base: float
) -> Rope:
    """Return factors for texts below and beyond the original length, and one for attention."""
    del base
    tensors = {}
    for key in ("long_factor", "short_factor"):
        factors = given.get(key)
        if not isinstance(factors, list) or len(factors) != rotated // 2:
            raise unsupported(key, quoted(factors)[:100], found)
        factors = [positive({key: one}, key) for one in factors]
        tensors[f"rope_factors_{key.removesuffix('_factor')}.weight"] = np.asarray(factors, np.float32)
    original = _original_length(settings, given)
    times = whole(settings, "max_position_embeddings") / original
    attention = optional_number(given, "attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(times) / math.log(original)) if times > 1.0 else 1.0
    fields = (
        *_scaling(found, "longrope"),
        _float(found, "rope.scaling.attn_factor", attention),
    )
    return Rope(fields, tensors)


_SCALINGS = {"linear": _linear, "yarn": _yarn, "llama3": _llama3, "longrope": _longrope}


def _scaling(found: Architecture, kind: str) -> tuple[Field, ...]:
    return (Field(f"{found.name}.rope.scaling.type", kind, _KIND.STRING),)


def _float(found: Architecture, key: str, value: float) -> Field:
    return Field(f"{found.name}.{key}", value, _KIND.FLOAT32)


def _original_length(settings: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    key = "original_max_position_embeddings"
    value = whole(given, key) if given.get(key) is not None else whole(settings, key)
    if value > 1:
        return value
    raise invalid(key, value, "a length of at least 2 tokens")
