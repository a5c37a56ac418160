"""Build graphs with mobius-onnx from the configuration alone: no tracing, no weights."""

from __future__ import annotations

import warnings
from typing import Any

import onnx_ir as ir
from mobius._build_context import build_context
from mobius._config_resolver import _config_from_hf, _default_task_for_model
from mobius._execution_providers import ep_registry
from mobius._optimizations import optimize_model
from mobius._registry import registry
from mobius.tasks import get_task

from slipway.errors import ONNXExportError
from slipway.model.families import DECODER
from slipway.model.limits import GROWING, rope_types
from slipway.sizes import format_size
from slipway_onnx_export.engines.lowering import lower
from slipway_onnx_export.forms.components import untraced_decoder
from slipway_onnx_export.interface import EngineGraph, GraphRequest
from slipway_onnx_export.ir_graphs import Statistics
from slipway_onnx_export.serving.shared_buffer import share_buffers
from slipway_onnx_export.source import WINDOW_LIMIT, ModelSource

_ROOT_SCALED = ("gemma", "gemma3_text")
"""Model types that multiply embeddings by the root of their width."""

INCORRECT = {
    **dict.fromkeys(("cohere", "cohere2", "gemma2", "gptj", "opt"), "with other results than PyTorch's"),
    **dict.fromkeys(
        ("deepseek_v3", "falcon", "glm", "glm4_moe", "gpt_neo", "llama4_text"), "with other weights than the model has"
    ),
    **dict.fromkeys(("bloom", "mpt"), "without an attention mask"),
    "gpt_oss": "with other results than PyTorch's beyond its window",
}
"""The fault of each model type that mobius knows and builds incorrectly; the comparison with PyTorch shows each."""

_LARGEST_TABLE = 1 << 30


def build(source: ModelSource, request: GraphRequest) -> list[EngineGraph]:
    """Build the graph of a text decoder that mobius supports.

    ``GroupQueryAttention``, in the form that mobius emits, derives positions and lengths from the sum of the attention mask,
    which is wrong for left padding. So this requests the standard Attention operator, which takes the mask itself.
    """
    if request.activations is not None:
        raise _unsupported_error(source, "mobius builds graphs without activations")
    module, config = _find_module(source, windowed=request.promise.shared_buffer)
    provider = "default" if request.optimization == "all" and request.runtime == "onnxruntime" else "onnx-standard"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config.validate()
        with build_context(ep_registry.require(provider), ir.DataType.FLOAT):
            model = get_task("text-generation").build(module, config)["model"]
        before = Statistics.of([model])
        optimize_model(model, ep=provider, dtype=ir.DataType.FLOAT, model_role="decoder")
    # Drop the functions that define ONNX Runtime's own operators for other runtimes: they use another opset.
    model.functions.clear()
    if request.promise.shared_buffer:
        share_buffers(model, window=source.sliding_window, dropped=_dropped_window(source, module))
    lower(model, request.opset)
    weights = module.preprocess_weights(dict(source.weights))
    return [EngineGraph(untraced_decoder(source.layers).fix_axes(request.sizes), model, weights, unoptimized=before)]


def supports(source: ModelSource) -> bool:
    """Return whether mobius builds a model without dropping a part of it."""
    try:
        _find_module(source)
    except ONNXExportError:
        return False
    return True


def _find_module(source: ModelSource, *, windowed: bool = False) -> tuple[Any, Any]:
    """Return mobius' module and configuration for the source's architecture; ``windowed`` if its dropped window is added later."""
    _check_type(source)
    config = source.config
    task = _default_task_for_model(config.model_type)
    if task != "text-generation":
        raise _unsupported_error(source, f"mobius builds {config.model_type!r} for {task}, not as a text decoder")
    if source.sliding_window > WINDOW_LIMIT:
        # mobius drops the window for some architectures; only a comparison beyond the window would show it.
        raise _unsupported_error(
            source, f"a sliding window of {source.sliding_window} tokens is too long for the comparison with PyTorch"
        )
    _check_rotary(source)
    kind = registry.get(config.model_type)
    try:
        settings = _config_from_hf(config, parent_config=config, module_class=kind)
        settings.dtype = ir.DataType.FLOAT
        module = kind(settings)
    except Exception as error:  # mobius' classes may raise anything
        what = f"mobius does not take the configuration of {source.architecture} ({type(error).__name__}: {error})"
        raise _unsupported_error(source, what) from error
    dropped = _dropped_window(source, module)
    if dropped and not windowed:
        raise _unsupported_error(source, f"mobius would drop the sliding window of {dropped} tokens")
    if config.model_type in _ROOT_SCALED:
        model: Any = module.model
        model.embed_tokens.embed_scale = (
            config.hidden_size**0.5
        )  # mobius rounds it, to two decimals or to half precision
    return module, settings


def _check_type(source: ModelSource) -> None:
    """Check that mobius builds models of this type, and all that such a model computes from text."""
    config = source.config
    if source.family is not DECODER:
        raise _unsupported_error(source, f"graphs of {source.family.name} models are traced, not built")
    if source.takes_more_than_text:
        raise _unsupported_error(source, f"mobius builds {config.model_type!r} with its other parts only")
    if source.keeps_states:
        raise _unsupported_error(source, f"mobius builds the states of {config.model_type!r} from padding too")
    if config.model_type not in registry:
        raise _unsupported_error(source, f"mobius does not know model type {config.model_type!r}")
    if config.model_type in INCORRECT:
        raise _unsupported_error(source, f"mobius builds {config.model_type!r} {INCORRECT[config.model_type]}")


def _check_rotary(source: ModelSource) -> None:
    config = source.text_config
    types = rope_types(config)
    if GROWING in types:
        raise _unsupported_error(source, "mobius would drop the growth of its rotary embeddings in long texts")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(config.max_position_embeddings) * int(width) * 4 if types else 0  # a sine and a cosine for two elements
    if size > _LARGEST_TABLE:
        raise _unsupported_error(source, f"mobius would write a table of {format_size(size)} for its rotary embeddings")


def _dropped_window(source: ModelSource, module: Any) -> int:
    """Return the sliding window of all layers that mobius writes in ``GroupQueryAttention`` only; 0 for none with an effect."""
    window = getattr(getattr(module, "model", None), "_gqa_local_window_size", None)
    return max(window(), 0) if window is not None and source.sliding_window else 0


def _unsupported_error(source: ModelSource, message: str) -> ONNXExportError:
    return ONNXExportError(
        message,
        reason="EXPORT_ENGINE_UNSUPPORTED",
        remedy="use engine dynamo",
        about={"engine": "mobius", "architecture": source.architecture, "model_type": source.config.model_type},
    )
