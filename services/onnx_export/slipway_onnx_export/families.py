"""Decide from ``config.json`` alone which models can be exported."""

from __future__ import annotations

from slipway.model.configuration import ModelConfig
from slipway.model.families import SPEECH


def refusal_reason(config: ModelConfig) -> str:
    """Return why a model is not exported; empty if it is."""
    what = config.description
    if config.family is None or (config.takes_more_than_text and config.family is not SPEECH):
        return f"the model is {_article(what)} {what}, which the ONNX export does not support"
    if config.keeps_states:
        return f"the model is {_article(what)} {what} with layers that keep a state, which the ONNX export does not support"
    return ""


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
