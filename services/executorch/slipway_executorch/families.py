"""Decide from ``config.json`` alone of which models programs are made."""

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
    alternative,
    described,
    family_of,
    keeps_states,
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
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings with the number of experts of a mixture."""


def refusal_reason(config: Mapping[str, Any]) -> str:
    """Return why no program is made of a model with this ``config.json``; empty if one is."""
    what = f"the model is of the kind {described(config)}"
    if family_of(config) not in TAKEN or takes_more_than_text(config):
        return f"{what}, and ExecuTorch programs are made of text decoders and encoders only{alternative(config)}"
    if keeps_states(config):
        return f"{what} with layers that keep a state, of which no ExecuTorch program is made"
    if any(isinstance(config.get(key), int) and config[key] > 1 for key in _EXPERTS):
        return f"{what} with a mixture of experts, of which no ExecuTorch program is made"
    return ""
