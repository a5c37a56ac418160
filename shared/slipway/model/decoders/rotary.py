"""The rotary embedding of a decoder: its base, its scaling for long texts, and the formulas that scalings share.

Sources: RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.model.decoders.values import ConfigValues

BASE = 10_000.0
ORIGINAL = "original_max_position_embeddings"
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embedding of layers with full attention, and of those with a sliding window.

    Attributes:
        kind: Kind of scaling, such as ``yarn``; ``default`` for none.
        base: Base of the frequencies.
        local_base: Base in layers with a sliding window.
        local_kind: Kind of scaling in layers with a sliding window.
        share: Share of a head that turns.
        rotated: Number of values of a head that turn.
        parameters: All settings of the scaling.
        settings: The model's settings.
        values: Reads settings.
    """

    kind: str
    base: float
    local_base: float
    local_kind: str
    share: float
    rotated: int
    parameters: Mapping[str, Any]
    settings: Mapping[str, Any]
    values: ConfigValues

    def original_length(self, default: int | None = None) -> int:
        """Return the tokens of the longest text before the scaling; raise if no setting says it and there is no default."""
        stated = self.parameters if self.parameters.get(ORIGINAL) is not None else self.settings
        length = self.values.whole(stated, ORIGINAL, default=default)
        if length < 2:
            raise self.values.invalid(ORIGINAL, length, "a length of at least 2 tokens")
        return length

    def stretched_base(self) -> float:
        """Return the base of the frequencies, which a fixed ``alpha`` stretches for long texts (HunYuan; NTK-aware scaling)."""
        alpha = self.values.positive(self.parameters, "alpha", 1.0) if self.kind == "dynamic" else 1.0
        return self.base * alpha ** (self.rotated / max(1, self.rotated - 2))

    def factor(self) -> float:
        """Return by how much frequencies are divided."""
        return self.values.positive(self.parameters, "factor")

    def factors(self, key: str) -> list[float]:
        """Return a number for each frequency, (rotated / 2,) of them."""
        factors = self.parameters.get(key)
        if not isinstance(factors, list) or len(factors) != self.rotated // 2:
            raise self.values.invalid(key, factors, f"a list of {self.rotated // 2} numbers")
        return [self.values.positive({key: one}, key) for one in factors]

    def beyond_yarn(self) -> tuple[str, Any] | None:
        """Return a setting of YaRN, with its value, that asks for another computation than the paper's; None if none does."""
        scale, of_all = (self.parameters.get(key) for key in ("mscale", "mscale_all_dim"))
        if scale is not None and (scale != 1 or of_all):  # 1 alone is the paper's
            return "mscale", scale
        if of_all is not None:
            return "mscale_all_dim", of_all
        attention, factor = self.values.optional_number(self.parameters, "attention_factor"), self.factor()
        if (
            attention is not None
            and abs(attention - (0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0)) > _TOLERANCE
        ):
            return "attention_factor", attention
        return ("truncate", False) if self.parameters.get("truncate") is False else None


def longrope_attention(times: float, original: int) -> float:
    """Return LongRoPE's factor for attention, for texts ``times`` as long as the original ones."""
    return math.sqrt(1 + math.log(times) / math.log(original)) if times > 1.0 else 1.0


def rotary_of(settings: Mapping[str, Any], width: int, values: ConfigValues, *, turned: str = "") -> Rotary:
    """Return the rotary embedding.

    Args:
        settings: The model's settings, with the defaults of its class.
        width: Width of a head.
        values: Reads settings, with the errors that a format raises: ``BASE_MODEL_INVALID`` for a wrong value.
        turned: Setting with the number of values of a head that turn, for classes that read one; it counts if no setting says their share.
    """
    full, local = _of_layers(settings, values)
    stated = turned and settings.get(turned) is not None
    whole = values.whole(settings, turned, most=width) / width if stated else 1.0
    share = values.positive(full, "partial_rotary_factor", values.positive(settings, "partial_rotary_factor", whole))
    if share > 1.0:
        raise values.invalid("partial_rotary_factor", share, "a share of a head, which is at most 1")
    kind = str(full.get("rope_type") or full.get("type") or "default")
    return Rotary(
        kind="longrope" if kind == "su" else kind,
        base=values.positive(full, "rope_theta", values.positive(settings, "rope_theta", BASE)),
        local_base=values.positive(local, "rope_theta", values.positive(settings, "rope_local_base_freq", BASE)),
        local_kind=str(local.get("rope_type") or "default"),
        share=share,
        rotated=int(width * share),
        parameters=full,
        settings=settings,
        values=values,
    )


def _of_layers(settings: Mapping[str, Any], values: ConfigValues) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the parameters of layers with full attention, and of those with a sliding window."""
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise values.invalid("rope_parameters", given, "an object")
    full, local = given.get("full_attention"), given.get("sliding_attention")
    if not isinstance(full, Mapping):
        return given, {}
    return full, local if isinstance(local, Mapping) else {}
