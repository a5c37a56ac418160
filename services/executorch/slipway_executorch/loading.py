"""Load a merged model in float32, in the form that is traced."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import ExecutorchExportError
from slipway.model.pytorch.text_model import TextModel, open_text_model
from slipway_executorch.attention import use_grouped_attention
from slipway_executorch.layers import replace_layers
from slipway_executorch.params import PRODUCT


def open_source(folder: Path) -> TextModel:
    """Load the model of a folder, with attention and layers that XNNPACK can compute.

    Raises:
        ExecutorchExportError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    source = open_text_model(
        folder, lambda config: config.why_no_text_graph(PRODUCT), title="ExecuTorch", error=ExecutorchExportError
    )
    use_grouped_attention(source.model)
    replace_layers(source.model)
    return source
