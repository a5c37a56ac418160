"""The metadata of a GGUF file: a model's numbers and rotary embedding as keys and tensors for llama.cpp.

Nothing has checked the settings of a ``config.json`` before, so they are checked here. A key of our own names the kinds of text that
llama.cpp is known to read otherwise; with it, validation tells them from a fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from slipway.errors import GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway.model.decoders.decoder import Decoder, decoder_of
from slipway.model.decoders.rotary import Rotary, longrope_attention
from slipway.texts import quoted
from slipway_gguf.architectures.entry import CONFIG_VALUES, Architecture, Numbers

DIFFERS = "slipway.tokenizer.differs"
BETWEEN = "; "
"""Separator between kinds of text (``slipway.validation.texts.TextKind``)."""

_KIND = gguf.GGUFValueType
_COUNTS = {
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Settings by key, each written if the model has it."""

whole, optional_number, positive = CONFIG_VALUES.whole, CONFIG_VALUES.optional_number, CONFIG_VALUES.positive


@dataclass(frozen=True, slots=True)
class Field:
    """One key of the metadata.

    Attributes:
        key: Name of the key, such as ``general.name``.
        value: Its value; a sequence for an array.
        kind: Type of the value.
        item: Type of an array's elements; None for anything else.
    """

    key: str
    value: Any
    kind: gguf.GGUFValueType
    item: gguf.GGUFValueType | None = None


@dataclass(frozen=True, slots=True)
class Parameters:
    """A model's numbers from its ``config.json``.

    Attributes:
        architecture: The architecture.
        decoder: The model's sizes.
        numbers: The model's settings, for entries of the table.
        fields: Keys of the metadata.
        experts: Number of experts; 0 for none.
        factors: Tensors of the rotary embedding by name.
        window: Number of positions beyond which results would differ from the model's, because llama.cpp computes no sliding window for
            this architecture; 0 if there is no such limit.
        heads: Number of layers behind the last one that predict further tokens.
        differs: What llama.cpp computes otherwise than the model, a little; empty if nothing.
    """

    architecture: Architecture
    decoder: Decoder
    numbers: Numbers
    fields: tuple[Field, ...]
    experts: int
    factors: Mapping[str, NDArray[np.float32]]
    window: int
    heads: int = 0
    differs: str = ""

    @property
    def blocks(self) -> int:
        """Number of layers in the file."""
        return self.decoder.layers + self.heads


def parameters_of(found: Architecture, config: ModelConfig, *, heads: int = 0) -> Parameters:
    """Return the numbers of a model.

    Args:
        found: Its architecture.
        config: Its ``config.json``.
        heads: Number of layers behind the last one that predict further tokens.

    Raises:
        GGUFExportError: ``BASE_MODEL_INVALID`` for a wrong number, ``FAMILY_UNSUPPORTED`` for one that llama.cpp does not compute.
    """
    decoder = decoder_of(config, CONFIG_VALUES, found.kind)
    settings, numbers = decoder.settings, Numbers(decoder, config)
    experts = whole(settings, *found.experts) if found.experts else 0
    limit = 0 if found.has_windows else min(decoder.windows, default=0)
    rope = rope_of(found, decoder)
    values: dict[str, Any] = {
        "context_length": limit or decoder.positions,
        "embedding_length": decoder.hidden,
        "block_count": decoder.layers + heads,
        "feed_forward_length": decoder.inner,
        "attention.head_count": decoder.heads,
        "attention.head_count_kv": decoder.kv_heads,
        "attention.key_length": decoder.width,
        "attention.value_length": decoder.width,
        "vocab_size": decoder.vocabulary,
        **({"expert_count": experts} if experts else {}),
        **{key: whole(settings, name) for key, name in _COUNTS.items() if experts and settings.get(name) is not None},
        **_window_keys(found, settings),
        **({"nextn_predict_layers": heads} if heads else {}),
        **{key: value for key, name in _NUMBERS.items() if (value := optional_number(settings, name)) is not None},
        **{key: value(numbers) for key, value in found.keys.items()},
    }
    own = (field_of(f"{found.name}.{key}", value) for key, value in values.items() if value is not None)
    made = found.factors(numbers) if found.factors else {}
    tensors = {**rope.tensors, **{name: np.asarray(each, np.float32) for name, each in made.items()}}
    return Parameters(found, decoder, numbers, (*own, *rope.fields), experts, tensors, limit, heads, rope.differs)


_KINDS: Mapping[type, gguf.GGUFValueType] = {
    bool: _KIND.BOOL,
    int: _KIND.UINT32,
    float: _KIND.FLOAT32,
    str: _KIND.STRING,
}


def field_of(key: str, value: Any) -> Field:
    """Return the key with a value of a type that follows from Python's; a tuple is an array."""
    if isinstance(value, tuple):
        item = _KINDS[type(value[0])]
        # llama.cpp reads arrays of whole numbers as signed ones.
        return Field(key, value, _KIND.ARRAY, _KIND.INT32 if item is _KIND.UINT32 else item)
    return Field(key, value, _KINDS[type(value)])


def _window_keys(architecture: Architecture, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the keys of a sliding window. Older versions of llama.cpp refuse Phi-3 without one; 0 means that it has none."""
    if architecture.has_windows:
        return {"attention.sliding_window": whole(settings, "sliding_window")}
    if architecture.name != "phi3":
        return {}
    window = settings.get("sliding_window")
    return {"attention.sliding_window": 0 if window is None else whole(settings, "sliding_window")}


def unsupported_error(key: str, value: object, found: Architecture) -> GGUFExportError:
    """Return the error for a setting that llama.cpp does not compute."""
    return GGUFExportError(
        f"{key} is {quoted(value)} in config.json, which llama.cpp does not compute for {found.class_name}",
        reason="FAMILY_UNSUPPORTED",
        remedy="use another format for this model",
        about={"key": key, "architecture": found.name},
    )


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model.

    Attributes:
        fields: Keys of the metadata.
        tensors: Factors of its frequencies, by the name of the tensor. (width / 2,)
        differs: What llama.cpp computes otherwise than the model, a little; empty if nothing.
    """

    fields: tuple[Field, ...] = ()
    tensors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    differs: str = ""


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
    if rotary.share != 1.0 and not found.partial:
        raise unsupported_error("partial_rotary_factor", rotary.share, found)
    if rotary.rotated < 2 or rotary.rotated % 2:
        raise unsupported_error("head_dim", decoder.width, found)
    fields = [
        Field(f"{found.name}.rope.dimension_count", rotary.rotated, _KIND.UINT32),
        _float(found, "rope.freq_base", rotary.stretched_base()),
    ]
    if found.name == "gemma3":
        fields.append(_float(found, "rope.freq_base_swa", rotary.local_base))
    if found.name == "phi3":  # also without scaling
        fields.append(_original_length(found, rotary))
    if rotary.local_kind != "default":
        raise unsupported_error("rope_type", rotary.local_kind, found)
    if rotary.kind == "default":
        return Rope(tuple(fields))
    if rotary.kind not in found.rope:
        raise unsupported_error("rope_type", rotary.kind, found)
    scaled = _SCALINGS[rotary.kind](found, decoder)
    return Rope((*fields, *scaled.fields), scaled.tensors, scaled.differs)


def _linear(architecture: Architecture, decoder: Decoder) -> Rope:
    return Rope(
        (*_scaling(architecture, "linear"), _float(architecture, "rope.scaling.factor", decoder.rotary.factor()))
    )


def _yarn(architecture: Architecture, decoder: Decoder) -> Rope:
    """Return the keys for YaRN; llama.cpp computes the factor for attention itself, as the paper does."""
    rotary = decoder.rotary
    other = rotary.beyond_yarn()
    rounds = other is not None and other[0] == "truncate" and architecture.rounds_yarn
    if other and not rounds and not (architecture.scales_yarn and other[0] == "mscale"):
        raise unsupported_error(*other, architecture)
    fields = [
        *_scaling(architecture, "yarn"),
        _float(architecture, "rope.scaling.factor", rotary.factor()),
        _original_length(architecture, rotary),
    ]
    for key in ("beta_fast", "beta_slow"):
        value = optional_number(rotary.parameters, key)
        if value is not None:
            fields.append(_float(architecture, f"rope.scaling.yarn_{key}", value))
    return Rope(tuple(fields), differs=_ROUNDED if rounds else "")


_ROUNDED = (
    "the range of frequencies that YaRN blends ends at whole numbers in llama.cpp, and not in the model (truncate is false in config.json): "
    "some frequencies differ by some percent, which long texts show most"
)


def _llama3(architecture: Architecture, decoder: Decoder) -> Rope:
    """Return the divisors of the frequencies as a tensor: low frequencies are divided, high ones are kept, and those between are blended."""
    del architecture
    rotary = decoder.rotary
    factor, low, high = (positive(rotary.parameters, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original, rotated = rotary.original_length(), rotary.rotated
    lengths = 2 * math.pi * rotary.base ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)  # (rotated / 2,)
    turns = original / lengths  # turns within a text of the original length
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0) if high != low else (turns >= low).astype(np.float64)
    divisors = 1.0 / ((1.0 - blend) / factor + blend)
    return Rope((), {"rope_freqs.weight": divisors.astype(np.float32)})


def _longrope(architecture: Architecture, decoder: Decoder) -> Rope:
    """Return the factors for texts up to and beyond the original length, and the factor for attention."""
    rotary = decoder.rotary
    tensors = {
        f"rope_factors_{which}.weight": np.asarray(rotary.factors(f"{which}_factor"), np.float32)
        for which in ("long", "short")
    }
    attention = optional_number(rotary.parameters, "attention_factor")
    if attention is None:
        original = rotary.original_length()
        attention = longrope_attention(decoder.positions / original, original)
    return Rope(
        (*_scaling(architecture, "longrope"), _float(architecture, "rope.scaling.attn_factor", attention)), tensors
    )


def _several_axes(architecture: Architecture, decoder: Decoder) -> Rope:
    """Return nothing: positions of several axes, which are equal in text, are no scaling."""
    del architecture, decoder
    return Rope()


def _stretched(architecture: Architecture, decoder: Decoder) -> Rope:
    """Return nothing beside the base, which is stretched; without ``alpha`` frequencies depend on the length of a text."""
    parameters = decoder.rotary.parameters
    if not parameters.get("alpha"):
        raise unsupported_error("rope_type", decoder.rotary.kind, architecture)
    return Rope()


_SCALINGS = {
    "dynamic": _stretched,
    "mrope": _several_axes,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def _scaling(architecture: Architecture, kind: str) -> tuple[Field, ...]:
    return (Field(f"{architecture.name}.rope.scaling.type", kind, _KIND.STRING),)


def _float(architecture: Architecture, key: str, value: float) -> Field:
    return Field(f"{architecture.name}.{key}", value, _KIND.FLOAT32)


def _original_length(architecture: Architecture, rotary: Rotary) -> Field:
    return Field(f"{architecture.name}.rope.scaling.original_context_length", rotary.original_length(), _KIND.UINT32)
