"""Decide from ``config.json`` alone of which models a graph is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.families import (
    DECODER,
    FEATURE_EXTRACTION,
    MASKED_LANGUAGE_MODEL,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    alternative,
    described,
    family_of,
    keeps_states,
    mixes_experts,
    takes_more_than_text,
)

TAKEN = (
    DECODER,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    QUESTION_ANSWERING,
    MASKED_LANGUAGE_MODEL,
    FEATURE_EXTRACTION,
)
"""Families that are exported."""


def refusal_reason(config: Mapping[str, Any]) -> str:
    """Return why no graph is made of a model with this ``config.json``; empty if one is."""
    what = f"the model is of the kind {described(config)}"
    if family_of(config) not in TAKEN or takes_more_than_text(config) or config.get("is_encoder_decoder"):
        return f"{what}, and graphs of PyTorch are made of text decoders and encoders only{alternative(config)}"
    if keeps_states(config):
        return f"{what} with layers that keep a state, of which no graph of PyTorch is made"
    if mixes_experts(config):
        return (
            f"{what} with a mixture of experts, of which a graph of PyTorch would run only those that its sample chose"
        )
    return ""
