"""Optimize a traced graph by onnxscript, keep small constants that it would take for zero, and keep libraries' notes out of the log."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer

_TAKEN_FOR_ZERO = 1e-8
"""Tolerance of onnxscript's patterns: ``x + 1e-12`` matches ``x + 0``, and the norm of a row of zeros becomes NaN."""

_LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "torch")


def optimize_graph(model: ir.Model) -> None:
    """Fold constants and simplify a graph in place. Weights have no values yet."""
    hidden = _hide_small_constants(model.graph)
    with quiet_libraries():
        onnxscript.optimizer.optimize_ir(model, onnx_shape_inference=False)
    for name, tensor in hidden.items():
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = tensor


def _hide_small_constants(graph: ir.Graph) -> dict[str, ir.TensorProtocol]:
    """Make small constants initializers without a value, as weights are; return their values by name."""
    hidden: dict[str, ir.TensorProtocol] = {}
    for node in [node for node in graph if node.op_type == "Constant" and "value" in node.attributes]:
        tensor, value = node.attributes["value"].as_tensor(), node.outputs[0]
        if not _is_small(tensor) or value.is_graph_output():
            continue
        name = f"{value.name}_kept"
        kept = ir.Value(name=name, shape=ir.Shape(tensor.numpy().shape), type=ir.TensorType(tensor.dtype))
        value.replace_all_uses_with(kept)
        graph.remove(node)
        graph.initializers[name] = kept
        hidden[name] = tensor
    for name, value in graph.initializers.items():
        if value.const_value is not None and _is_small(value.const_value):
            hidden[name], value.const_value = value.const_value, None
    return hidden


def _is_small(tensor: ir.TensorProtocol) -> bool:
    if tensor.size != 1 or not tensor.dtype.is_floating_point():
        return False
    return 0 < abs(float(np.asarray(tensor.numpy(), np.float64).reshape(()))) <= _TAKEN_FOR_ZERO


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the export libraries' warnings, and their logs below errors."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
