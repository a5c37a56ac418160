"""Decide from ``config.json`` alone of which models a graph is made."""

from __future__ import annotations

from slipway.model.configuration import ModelConfig
from slipway_torchscript.params import PRODUCT


def refusal_reason(config: ModelConfig) -> str:
    """Return why no graph is made of a model; empty if one is."""
    why = config.why_no_text_graph(PRODUCT)
    if not why and config.get("is_encoder_decoder"):
        return f"the model is of the kind {config.description} with a separate encoder, of which no {PRODUCT} is made"
    return why
