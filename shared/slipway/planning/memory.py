"""Estimate the memory of a plan's tasks by the size of the model. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slipway.formats.tasks import PlannedTask
from slipway.registry import known_stage
from slipway.sizes import FLOAT32_BYTES, ModelSize
from slipway.stage import Hardware

_LIBRARIES_BYTES = 700 << 20
"""Memory of torch and transformers before any weight is loaded."""


def memory_bytes(
    tasks: Sequence[PlannedTask], size: ModelSize, *, least: bool = False, layers_of_experts: int = 0
) -> int:
    """Estimate the memory of the task that needs most. Streaming stages hold a few copies of the largest tensor.

    Args:
        tasks: The tasks.
        size: Size of the model.
        least: Whether to return what suffices where stages leave something out for want of memory.
        layers_of_experts: Number of layers of a mixture, whose experts are joined while their layer is computed; 0 for another model.
    """
    streaming = 4 * size.largest * FLOAT32_BYTES
    whole = size.weights * FLOAT32_BYTES  # stages with memory of the model's size load all of it
    hardware = _hardware(tasks)
    if any((each.memory and not (least and each.less_memory)) or each.gpu_memory for each in hardware):
        return _LIBRARIES_BYTES + whole + streaming
    joins = layers_of_experts and any(each.memory for each in hardware)
    joined = whole // layers_of_experts * 3 // 2 if joins else 0  # in float32, and as they are stored
    return _LIBRARIES_BYTES + max(streaming, joined)


def list_left_out(tasks: Sequence[PlannedTask]) -> str:
    """Return what stages leave out with the memory that suffices for all others."""
    return "; ".join(dict.fromkeys(each.less_memory for each in _hardware(tasks) if each.less_memory))


def _hardware(tasks: Sequence[PlannedTask]) -> list[Hardware]:
    return [stage.hardware for task in tasks if (stage := known_stage(task.stage)) is not None]
