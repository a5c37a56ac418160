"""Decide from ``config.json`` alone which models can be exported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.models.families import SPEECH, described, family_of, takes_more_than_text

_STATES = (
    *(
        "state_size",
        "ssm_state_size",
        "ssm_cfg",
        "mamba_d_state",
        "conv_L_cache",
        "lru_width",
        "linear_conv_kernel_dim",
    ),
    *("rescale_every", "slstm_at", "inference_state_dtype", "number_of_conv_states"),
)
"""Settings of a decoder that keeps states beside, or instead of, keys and values of attention."""

_STATE_LAYERS = ("conv", "hybrid", "linear_attention", "mamba", "recurrent")


def refusal_reason(config: Mapping[str, Any]) -> str:
    """Return why a model is not exported; empty if it is."""
    what = described(config)
    if family_of(config) is None or (takes_more_than_text(config) and family_of(config) is not SPEECH):
        return f"the model is {_article(what)} {what}, which the ONNX export does not support"
    kinds = config.get("layer_types")
    keeps = isinstance(kinds, list) and any(str(kind).startswith(_STATE_LAYERS) for kind in kinds)
    if keeps or any(config.get(key) is not None for key in _STATES):
        return f"the model is {_article(what)} {what} with layers that keep a state, which the ONNX export does not support"
    return ""


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
