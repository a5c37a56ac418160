"""Decide from ``config.json`` alone of which models a graph is made."""

from __future__ import annotations

from slipway.model.configuration import ModelConfig


def refusal_reason(config: ModelConfig) -> str:
    """Return why no graph is made of a model; empty if one is."""
    if config.get("is_encoder_decoder") and not config.why_no_text_graph("PyTorch graph"):
        return (
            f"the model is of the kind {config.description} with a separate encoder, of which no PyTorch graph is made"
        )
    return config.why_no_text_graph("PyTorch graph")
