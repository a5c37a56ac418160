"""Decide from ``config.json`` alone of which models formats make one graph that takes a text."""

from __future__ import annotations

from slipway.model.configuration import ModelConfig
from slipway.model.families import ENCODER_DECODER, SPEECH, TEXT_FAMILIES


def why_no_text_graph(config: ModelConfig, product: str) -> str:
    """Return why a format makes nothing of a model; empty if it does.

    It does of models that are one graph that takes a text: without experts, and without layers that keep a state.

    Args:
        config: The model's configuration.
        product: Name of what the format makes, such as ``ExecuTorch program``.
    """
    what = f"the model is of the kind {config.description}"
    if config.family not in TEXT_FAMILIES or config.takes_more_than_text:
        alternative = "; ONNX takes it" if config.family in (ENCODER_DECODER, SPEECH) else ""
        return f"{what}, and {product}s are made of text decoders and encoders only{alternative}"
    if config.keeps_states:
        return f"{what} with layers that keep a state, of which no {product} is made"
    if config.mixes_experts:
        return f"{what} with a mixture of experts, of which no {product} is made"
    return ""
