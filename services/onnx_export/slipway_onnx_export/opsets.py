"""Which ONNX opsets each export engine really writes: known without loading an engine, so that a plan can say what will come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENGINE_OPSETS: Mapping[str, range] = {"mobius": range(14, 25), "dynamo": range(18, 24), "legacy": range(14, 18)}
"""Engines in the order in which an export tries them, with what they write."""

BEST_OPSET = 23
"""What mobius and dynamo write for ONNX Runtime where none is asked for: the smallest graphs."""


def unwritten(opset: int) -> str:
    """Say what is written where no engine writes the opset that is asked for; empty where one does, or for 0, the best.

    The recovery table leads there: an opset below 18 is raised to 18, a later one becomes the engine's best.
    """
    if opset == 0 or any(opset in opsets for opsets in ENGINE_OPSETS.values()):
        return ""
    lowest = min(opsets.start for opsets in ENGINE_OPSETS.values())
    highest = max(opsets.stop for opsets in ENGINE_OPSETS.values()) - 1
    instead = "opset 18" if opset < 18 else f"opset {BEST_OPSET}, the preferred engine's best,"
    return (
        f"formats.onnx.opset_version is {opset}, and no engine writes opsets but {lowest} to {highest}: "
        f"the ONNX model will have {instead} instead"
    )


def opset_advice(params: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Say of a task's parameters what :func:`unwritten` says, with a remedy."""
    message = unwritten(params.get("opset") or 0)
    return ("opset", message, "set formats.onnx.opset_version to 0 for the engine's best") if message else None
