"""What a verdict says of the adapter in an output's stored weights."""

from __future__ import annotations

from slipway.validation.survival import AdapterSurvival
from slipway_validate.judging import survival
from slipway_validate.judging.limits import LIMITS


def said(found: AdapterSurvival, level: str = "float32") -> str:
    """Return how the verdict blames the output at a level; empty if it does not."""
    return survival.explain(survival.judged(found, LIMITS[level]))[0]
