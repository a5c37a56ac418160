"""The rotary embedding: its base, and the scaling for long texts, as keys and tensors that llama.cpp reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import gguf
import numpy as np
from numpy.typing import NDArray

from slipway.model.decoders.decoder import Decoder
from slipway.model.decoders.rotary import Rotary, longrope_attention
from slipway_gguf.architectures.settings import optional_number, positive, unsupported
from slipway_gguf.architectures.table import Architecture
from slipway_gguf.metadata import Field

_KIND = gguf.GGUFValueType


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model.

    Attributes:
        fields: Keys of the metadata.
        tensors: Factors of its frequencies, by the name of the tensor. (width / 2,)
    """

    fields: tuple[Field, ...] = ()
    tensors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def rope_of(found: Architecture, decoder: Decoder) -> Rope:
    """Return the rotary embedding.

    Args:
        found: The architecture.
        decoder: The model.

    Raises:
        GGUFExportError: ``FAMILY_UNSUPPORTED`` for a scaling that llama.cpp does not compute for this architecture.
    """
    if not found.rope:
        return Rope()
    rotary = decoder.rotary
    if rotary.share != 1.0 and found.name != "phi3":
        raise unsupported("partial_rotary_factor", rotary.share, found)
    if rotary.rotated < 2 or rotary.rotated % 2:
        raise unsupported("head_dim", decoder.width, found)
    fields = [
        Field(f"{found.name}.rope.dimension_count", rotary.rotated, _KIND.UINT32),
        _float(found, "rope.freq_base", rotary.base),
    ]
    if found.name == "gemma3":
        fields.append(_float(found, "rope.freq_base_swa", rotary.local_base))
    if found.name == "phi3":  # also without scaling
        fields.append(_original_length(found, rotary))
    if rotary.local_kind != "default":
        raise unsupported("rope_type", rotary.local_kind, found)
    if rotary.kind == "default":
        return Rope(tuple(fields))
    if rotary.kind not in found.rope:
        raise unsupported("rope_type", rotary.kind, found)
    scaled = _SCALINGS[rotary.kind](found, decoder)
    return Rope((*fields, *scaled.fields), scaled.tensors)


def _linear(found: Architecture, decoder: Decoder) -> Rope:
    return Rope((*_scaling(found, "linear"), _float(found, "rope.scaling.factor", decoder.rotary.factor())))


def _yarn(found: Architecture, decoder: Decoder) -> Rope:
    """Return YaRN, whose factor for attention llama.cpp computes itself, as the paper does."""
    rotary = decoder.rotary
    if other := rotary.beyond_yarn():
        raise unsupported(*other, found)
    fields = [
        *_scaling(found, "yarn"),
        _float(found, "rope.scaling.factor", rotary.factor()),
        _original_length(found, rotary),
    ]
    for key in ("beta_fast", "beta_slow"):
        value = optional_number(rotary.parameters, key)
        if value is not None:
            fields.append(_float(found, f"rope.scaling.yarn_{key}", value))
    return Rope(tuple(fields))


def _llama3(found: Architecture, decoder: Decoder) -> Rope:
    """Return the divisors of the frequencies as a tensor: low frequencies are divided, high ones kept, those between blended."""
    del found
    rotary = decoder.rotary
    factor, low, high = (positive(rotary.parameters, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original, rotated = rotary.original_length(), rotary.rotated
    lengths = 2 * math.pi * rotary.base ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)  # (rotated / 2,)
    blend = np.clip((original / lengths - low) / (high - low) if high != low else 0.0, 0.0, 1.0)
    divisors = 1.0 / ((1.0 - blend) / factor + blend)
    return Rope((), {"rope_freqs.weight": divisors.astype(np.float32)})


def _longrope(found: Architecture, decoder: Decoder) -> Rope:
    """Return factors for texts below and beyond the original length, and one for attention."""
    rotary = decoder.rotary
    tensors = {
        f"rope_factors_{which}.weight": np.asarray(rotary.factors(f"{which}_factor"), np.float32)
        for which in ("long", "short")
    }
    attention = optional_number(rotary.parameters, "attention_factor")
    if attention is None:
        original = rotary.original_length()
        attention = longrope_attention(decoder.positions / original, original)
    return Rope((*_scaling(found, "longrope"), _float(found, "rope.scaling.attn_factor", attention)), tensors)


_SCALINGS = {"linear": _linear, "yarn": _yarn, "llama3": _llama3, "longrope": _longrope}


def _scaling(found: Architecture, kind: str) -> tuple[Field, ...]:
    return (Field(f"{found.name}.rope.scaling.type", kind, _KIND.STRING),)


def _float(found: Architecture, key: str, value: float) -> Field:
    return Field(f"{found.name}.{key}", value, _KIND.FLOAT32)


def _original_length(found: Architecture, rotary: Rotary) -> Field:
    return Field(f"{found.name}.rope.scaling.original_context_length", rotary.original_length(), _KIND.UINT32)
