"""Read the importance of inputs, by which ggml weighs the errors of rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipway.errors import GGUFExportError
from slipway.model.safetensors_file import read_safetensors
from slipway.model.weights.reading import mapped
from slipway_gguf.weights.tensors import Planned

FILE = "importance.safetensors"
_LEAST = 1e-6
"""Least importance, as a share of a tensor's mean: an input that the text never uses may still matter."""


def read_importance(folder: Path, tensors: Sequence[Planned]) -> dict[str, NDArray[np.float32]]:
    """Return the importance of each column by name of the file's tensor, for those that a vector was measured for.

    Raises:
        GGUFExportError: ``CALIBRATION_MISMATCH``: it is of another model.
    """
    measured = read_safetensors(folder / FILE).tensors
    found = {}
    for planned in tensors:
        name = planned.parts[0].tensor.name if len(planned.parts) == 1 else ""
        if name not in measured or len(planned.shape) != 2:
            continue
        info = measured[name]
        values = np.array(mapped(info)) if info.dtype == "F32" else np.empty(0, np.float32)
        if values.shape != planned.shape[1:] or not np.isfinite(values).all() or (values < 0).any():
            raise GGUFExportError(
                f"the importance of {name!r} is {info.dtype} {info.shape}, and not {planned.shape[1]} numbers from 0",
                reason="CALIBRATION_MISMATCH",
                remedy="measure it with this model",
                about={"tensor": name},
            )
        found[planned.name] = np.maximum(values, np.float32(_LEAST) * values.mean() or np.float32(1.0))
    return found
