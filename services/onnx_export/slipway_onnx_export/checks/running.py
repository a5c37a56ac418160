"""Checks that load a written folder in ONNX Runtime, and run it if it is tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator

from slipway_onnx_export.checks.written import Described, FaultError, NotRunError, Written
from slipway_onnx_export.interface import PAST, PRESENT
from slipway_onnx_export.parity.ort_errors import ort_failures

_TOLERANCE = 1e-3
NOT_TINY = "the graphs are too large or lack their weights"


def load(written: Written) -> None:
    """Each graph loads."""
    for component in written.components:
        open_unoptimized(written.folder / component.file)


def grow_caches(written: Written) -> None:
    """No cache that a graph returns has length zero, neither from an empty past nor from a longer one."""
    for component in written.components:
        for value in written.graphs[component.file].graph.output:
            fixed = [axis.dim_value for axis in value.type.tensor_type.shape.dim if axis.HasField("dim_value")]
            if 0 in fixed:
                raise FaultError(f"{component.file} returns {value.name!r} of length zero")
    if not written.tiny:
        raise NotRunError(NOT_TINY + "; the comparison with PyTorch or the validation runs them")
    for component in written.components:
        for past in (0, 4):
            for name, array in _run(written, component, past=past).items():
                if name.startswith(PRESENT) and 0 in array.shape:
                    raise FaultError(f"{component.file} returns {name!r} of length zero after {past} tokens")


def agree_with_reference(written: Written) -> None:
    """ONNX's own reference computes what ONNX Runtime does."""
    if not written.tiny:
        raise NotRunError(NOT_TINY)
    for component in written.components:
        past = 2 if any(PAST in port.shape for port in component.inputs) else 0
        found, feed = _run(written, component, past=past), written.feed(component, past=past, new=3)
        try:
            reference = ReferenceEvaluator(onnx.load(written.folder / component.file))
            wanted = reference.run(list(found), feed)
        except Exception as error:  # the reference lets any exception of an operator's Python code through
            raise NotRunError(f"the reference cannot run {component.file}: {first_line(error)}") from error
        for (name, array), other in zip(found.items(), wanted, strict=True):
            scale = max(1.0, float(np.abs(other).max(initial=0)))
            far = (
                float(np.abs(array.astype(np.float64) - other).max(initial=0))
                if array.shape == other.shape
                else float("inf")
            )
            if not far <= _TOLERANCE * scale:
                raise FaultError(f"{name!r} of {component.file} differs from ONNX's reference by {far:.3g}")


def open_unoptimized(path: Path) -> Any:
    """Load a graph with one thread. Nothing is optimized or packed, so its weights are mapped, and read only where it runs.

    Raises:
        FaultError: ONNX Runtime cannot load it.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    what = f"onnxruntime {onnxruntime.__version__} cannot load {path.name}"
    with ort_failures(lambda error: FaultError(f"{what}: {first_line(error)}")):
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(written: Written, component: Described, *, past: int) -> dict[str, Any]:
    session = open_unoptimized(written.folder / component.file)
    names = [value.name for value in session.get_outputs()]
    with ort_failures(lambda error: FaultError(f"onnxruntime cannot run {component.file}: {first_line(error)}")):
        return dict(zip(names, session.run(names, written.feed(component, past=past, new=3)), strict=True))


def first_line(error: Exception) -> str:
    """Return the first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
