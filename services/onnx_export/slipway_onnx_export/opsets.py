"""The ONNX opsets that each export engine writes, known without loading an engine, so that a plan can announce the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENGINE_OPSETS: Mapping[str, range] = {"mobius": range(14, 25), "dynamo": range(18, 24), "legacy": range(14, 18)}
"""Engines in the order in which an export tries them, with the opsets they write."""

BEST_OPSET = 23
"""Opset that mobius and dynamo write for ONNX Runtime by default: it gives the smallest graphs."""


def describe_replaced_opset(opset: int) -> str:
    """Describe the opset that is written instead if no engine writes the requested one; empty if one does, or for 0.

    The recovery table decides this: an older opset is raised to the oldest that engines write, a later one becomes the engine's best.
    """
    if opset == 0 or any(opset in opsets for opsets in ENGINE_OPSETS.values()):
        return ""
    lowest = min(opsets.start for opsets in ENGINE_OPSETS.values())
    highest = max(opsets.stop for opsets in ENGINE_OPSETS.values()) - 1
    instead = f"opset {lowest}" if opset < lowest else f"opset {BEST_OPSET}, the preferred engine's best,"
    return (
        f"formats.onnx.opset_version is {opset}, and engines write opsets {lowest} to {highest} only: "
        f"the ONNX model will have {instead} instead"
    )


def opset_advice(params: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the parameter, message and remedy if a task's opset will be replaced by another; None otherwise."""
    message = describe_replaced_opset(params.get("opset") or 0)
    return ("opset", message, "set formats.onnx.opset_version to 0 for the engine's best") if message else None
