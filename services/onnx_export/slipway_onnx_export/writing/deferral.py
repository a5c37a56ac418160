"""Decide by the parameters whether a graph's weights may be left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NEEDED: Mapping[str, Any] = {
    "runtime": "onnxruntime",
    "tracer_warnings": "refuse",
    "external_data": True,
    "layered": False,
    "optimization_times": False,
}
"""Parameters with which only the next stage needs the weights."""


def can_leave_out(params: Mapping[str, Any]) -> bool:
    """Return whether weights may be left out with these parameters: nothing of this stage needs them."""
    unusual = any(params.get(name, value) != value for name, value in _NEEDED.items())
    return not (unusual or params.get("parity") == "always" or params.get("packaging") or params.get("activations"))
