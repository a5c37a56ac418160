"""What a verdict says of the adapter in an output's stored weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.validation.inputs import input_of
from slipway.validation.survival import AdapterSurvival
from slipway_validate.judging import survival
from slipway_validate.judging.distances import LIMITS
from slipway_validate.runner.survival.measuring import measure
from slipway_validate.stored_weights import survival_spec


def survival_of(base: Path, adapter: Path, outputs: Mapping[str, Path]) -> dict[str, AdapterSurvival]:
    """Return what outputs hold of an adapter, measured as the stage asks for it."""
    inputs = {"base": base, "adapter": adapter, **{input_of(name): folder for name, folder in outputs.items()}}
    spec = survival_spec(inputs, LIMITS)
    assert spec is not None
    return measure(spec, report=lambda _done, _total: None)


def said(found: AdapterSurvival, level: str = "float32") -> str:
    """Return how the verdict blames the output at a level; empty if it does not."""
    return survival.explain(survival.add_faults(found, LIMITS[level]))[0]
