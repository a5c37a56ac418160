"""Give a sentence encoder's graph the output of the text's vector, if its pooling is known."""

from __future__ import annotations

from slipway.model.families import FEATURE_EXTRACTION
from slipway.model.sentences import Pooling, UnknownPoolingError, read_pooling
from slipway.stage import Context
from slipway_onnx_export.source import ModelSource


def pooling_of(source: ModelSource) -> Pooling | None:
    """Return how a sentence encoder makes one vector of a text; None if the model is no such encoder, or that is not known."""
    try:
        return read_pooling(source.folder) if source.family is FEATURE_EXTRACTION else None
    except UnknownPoolingError:
        return None


def warn_of_unknown_pooling(source: ModelSource, ctx: Context) -> None:
    """Warn if a sentence encoder's graph gives the vectors of tokens only."""
    if source.family is not FEATURE_EXTRACTION:
        return
    try:
        read_pooling(source.folder)
    except UnknownPoolingError as error:
        ctx.warn(
            f"the ONNX model has no output sentence_embedding: {error}; pool its last_hidden_state as the model's files say"
        )
