"""Graphs built by mobius-onnx from the configuration alone: no tracing, no weights."""

from __future__ import annotations

import warnings
from typing import Any

import mobius
import onnx_ir as ir
from mobius._config_resolver import _config_from_hf, _default_task_for_model
from mobius._registry import registry

from slipway.errors import ONNXExportError
from slipway_onnx_export.engines import EngineGraph, GraphRequest
from slipway_onnx_export.lowering import lower
from slipway_onnx_export.source import WINDOW_LIMIT, ModelSource


def build(source: ModelSource, request: GraphRequest) -> EngineGraph:
    """Build the graph for a text decoder that mobius knows.

    ``GroupQueryAttention`` as mobius emits it derives positions and lengths from the sum of the attention mask, which is
    wrong for left padding; the standard Attention operator takes the mask itself, so that is what is asked for.
    """
    module, config = _module(source)
    provider = "default" if request.optimize and request.runtime == "onnxruntime" else "onnx-standard"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = mobius.build_from_module(module, config, "text-generation", execution_provider=provider)
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise ONNXExportError(
            f"mobius could not build {source.architecture}: {error}",
            reason="EXPORT_ENGINE_FAILED",
            remedy="use engine dynamo",
            about={"engine": "mobius", "architecture": source.architecture},
        ) from error
    model = package["model"]
    # Bodies of ONNX Runtime's own operators, for runtimes without them; written in an opset of their own.
    model.functions.clear()
    lower(model, request.opset)
    weights = module.preprocess_weights(dict(source.weights))
    return EngineGraph(model=model, weights=weights)


def _module(source: ModelSource) -> tuple[Any, Any]:
    """The module and configuration for the source's architecture, as mobius knows them."""
    config = source.config
    if config.model_type not in registry:
        raise _unsupported(source, f"mobius does not know model type {config.model_type!r}")
    task = _default_task_for_model(config.model_type)
    if task != "text-generation":
        raise _unsupported(source, f"mobius builds {config.model_type!r} for {task}, not as a text decoder")
    if source.sliding_window > WINDOW_LIMIT:
        # mobius leaves the window out for some architectures; only a comparison beyond it would show.
        raise _unsupported(source, f"a sliding window of {source.sliding_window} tokens is longer than can be proven")
    kind = registry.get(config.model_type)
    settings = _config_from_hf(config, parent_config=config, module_class=kind)
    settings.dtype = ir.DataType.FLOAT
    module = kind(settings)
    window = getattr(getattr(module, "model", None), "_gqa_local_window_size", None)
    if window is not None and window() > 0:
        raise _unsupported(source, f"mobius would drop the sliding window of {window()} tokens")
    return module, settings


def _unsupported(source: ModelSource, message: str) -> ONNXExportError:
    return ONNXExportError(
        message,
        reason="EXPORT_ENGINE_UNSUPPORTED",
        remedy="use engine dynamo",
        about={"engine": "mobius", "architecture": source.architecture, "model_type": source.config.model_type},
    )
