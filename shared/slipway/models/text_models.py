"""Decide from ``config.json`` alone whether a model is one graph that takes a text: a decoder, or an encoder with or without a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.models.families import (
    DECODER,
    FEATURE_EXTRACTION,
    MASKED_LANGUAGE_MODEL,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    described,
    family_of,
    keeps_states,
    mixes_experts,
    onnx_instead,
    takes_more_than_text,
)

TEXT_FAMILIES = (
    DECODER,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    QUESTION_ANSWERING,
    MASKED_LANGUAGE_MODEL,
    FEATURE_EXTRACTION,
)
"""Families of such models."""


def why_no_text_graph(config: Mapping[str, Any], product: str) -> str:
    """Return why a format makes nothing of a model with this ``config.json``; empty if it does.

    Mixtures of experts and layers that keep a state count as reasons.

    Args:
        config: The model's configuration.
        product: Name of what the format makes, such as ``ExecuTorch program``.
    """
    what = f"the model is of the kind {described(config)}"
    if family_of(config) not in TEXT_FAMILIES or takes_more_than_text(config):
        return f"{what}, and {product}s are made of text decoders and encoders only{onnx_instead(config)}"
    if keeps_states(config):
        return f"{what} with layers that keep a state, of which no {product} is made"
    if mixes_experts(config):
        return f"{what} with a mixture of experts, of which no {product} is made"
    return ""
