"""Load a merged model in float32, in the form that is traced."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import LiteRtExportError
from slipway.model.generation.settings import token_of
from slipway.model.pytorch.text_model import TextModel, open_text_model
from slipway_litert.attention import use_grouped_attention
from slipway_litert.params import PRODUCT


def open_source(folder: Path) -> TextModel:
    """Load the model of a folder.

    Raises:
        LiteRtExportError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    source = open_text_model(
        folder, lambda config: config.why_no_text_graph(PRODUCT), title="LiteRT", error=LiteRtExportError
    )
    use_grouped_attention(source.model)
    return source


def padding_of(source: TextModel) -> int:
    """Return the token in places without one."""
    return token_of(source.model.config, "pad_token_id") or 0
