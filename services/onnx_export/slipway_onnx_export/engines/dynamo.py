"""Trace graphs with ``torch.onnx.export(dynamo=True)`` from a model without weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnxscript.optimizer
import onnxscript.rewriter.onnx_fusions
import torch

from slipway.errors import ONNXExportError
from slipway_onnx_export.engines import EngineGraph, GraphRequest
from slipway_onnx_export.source import ModelSource
from slipway_onnx_export.weightless import (
    BATCH,
    PAST,
    SEQUENCE,
    TOTAL,
    FlatDecoder,
    build_weightless_decoder,
    interface_names,
    tied_weights,
    trace_inputs,
)

# FlatDecoder has the transformers model in this attribute.
PREFIX = "model."


def build(source: ModelSource, request: GraphRequest) -> EngineGraph:
    """Trace the graph of any causal language model of transformers whose code torch.export supports."""
    decoder = build_weightless_decoder(source, engine="dynamo", attention=("sdpa", "eager"))
    model = _trace(decoder, source, opset=request.opset)
    initializers = model.graph.initializers
    parameters = {PREFIX + name for name, _ in decoder.model.named_parameters(remove_duplicate=False)}
    for name in [name for name in initializers if name in parameters]:
        # Remove the placeholder values before optimizing, or they would be folded into the graph.
        initializers[name].const_value = None
        initializers[name].name = name.removeprefix(PREFIX)
    onnxscript.optimizer.optimize_ir(model, onnx_shape_inference=False)
    onnxscript.rewriter.onnx_fusions.fuse(model)  # into the operators of opset 23, if the graph is written in it
    return EngineGraph(model=model, weights=tied_weights(decoder, source))


def _trace(decoder: FlatDecoder, source: ModelSource, *, opset: int) -> Any:
    """Return the graph as an onnx_ir model, before any optimization."""
    example = trace_inputs(decoder)
    inputs, outputs = interface_names(len(example[3]) // 2)
    axes = {0: BATCH, 1: SEQUENCE}
    shapes = (axes, {0: BATCH, 1: TOTAL}, axes, [{0: BATCH, 2: PAST}] * len(example[3]))
    try:
        with _silence_torch(), torch.no_grad():
            program = torch.onnx.export(
                decoder,
                example,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=inputs,
                output_names=outputs,
                opset_version=opset,
                optimize=False,
                verbose=False,
            )
    except Exception as error:  # torch.export lets any exception of the model's or its own code through
        raise ONNXExportError(
            f"torch {torch.__version__} could not trace {source.architecture}: {_first_line(error)}",
            reason="EXPORT_ENGINE_FAILED",
            remedy="use engine legacy",
            about={"engine": "dynamo", "architecture": source.architecture, "cause": type(error).__name__},
        ) from error
    assert program is not None
    return program.model


@contextmanager
def _silence_torch() -> Iterator[None]:
    """Keep torch's progress messages out of the stage's log."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "torch")]
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


def _first_line(error: BaseException) -> str:
    """Return the first line of the innermost cause's message."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
