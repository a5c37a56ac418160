"""The integer levels of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.models.families import Comparison, described, family_of

INTEGER_BITS = {"int8": 8, "int4": 4}
"""Bits of the integer levels."""


@dataclass(frozen=True, slots=True)
class IntLevel:
    """An integer level of the weights.

    Attributes:
        bits: 4 or 8.
        group_size: Weights per scale.
        packed: Whether integers and scales are stored; if not, the same values as dense weights of the original type.
    """

    bits: int
    group_size: int
    packed: bool


def refusal_reason(params: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return why a model with this ``config.json`` is not quantized with these parameters; empty if it is."""
    if params.get("format") != "pytorch" or params.get("level") not in INTEGER_BITS or family_of(config) is not None:
        return ""
    return unknown_family(config)


def why_not_calibrated(params: Mapping[str, Any], config: Mapping[str, Any]) -> str:  # noqa: ARG001 - of any level
    """Return why a model with this ``config.json`` is not calibrated; empty if it is, or if only its weights tell."""
    family = family_of(config)
    if family is None:
        return unknown_family(config)
    return (
        f"a model of family {family.name} is not calibrated" if family.comparison is Comparison.TEACHER_FORCED else ""
    )


def unknown_family(config: Mapping[str, Any]) -> str:
    """Say that the weights of this model are not rounded."""
    return f"the family of a {described(config)} is unknown, so its weights are not rounded to integers"
