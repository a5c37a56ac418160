"""The integer levels of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.levels import bits_of
from slipway.models.families import SPEECH, described, family_of


@dataclass(frozen=True, slots=True)
class IntLevel:
    """An integer level of the weights.

    Attributes:
        bits: 4 or 8.
        group_size: Weights per scale.
        packed: Whether integers and scales are stored; if not, the same values as dense weights of the original type.
        keep: Names of linear layers that keep their type.
    """

    bits: int
    group_size: int
    packed: bool
    keep: frozenset[str] = frozenset()

    def keeps(self, module: str) -> bool:
        """Return whether a linear layer keeps its type. One of the two names may lack the prefix of the model's class."""
        return any(f".{module}".endswith(f".{name}") or f".{name}".endswith(f".{module}") for name in self.keep)


def refusal_reason(params: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return why a model with this ``config.json`` is not quantized with these parameters; empty if it is."""
    if params.get("format") != "pytorch" or not bits_of(str(params.get("level"))) or family_of(config) is not None:
        return ""
    return unknown_family(config)


def reads_deferred(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the inputs whose weights may be left out: the model of a format that is read a few rows at a time."""
    return ("model",) if params.get("format") in ("pytorch", "onnx") else ()


def why_not_calibrated(params: Mapping[str, Any], config: Mapping[str, Any]) -> str:  # noqa: ARG001 - of any level
    """Return why a model with this ``config.json`` is not calibrated; empty if it is, or if only its weights tell."""
    family = family_of(config)
    if family is None:
        return unknown_family(config)
    return f"a model of family {family.name} is not calibrated: its inputs are sound" if family is SPEECH else ""


def unknown_family(config: Mapping[str, Any]) -> str:
    """Say that the weights of this model are not rounded."""
    return f"the family of a {described(config)} is unknown, so its weights are not rounded to integers"
