"""Decide from ``config.json`` alone which models can be exported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.families import SPEECH, described, family_of, keeps_states, takes_more_than_text


def refusal_reason(config: Mapping[str, Any]) -> str:
    """Return why a model is not exported; empty if it is."""
    what = described(config)
    if family_of(config) is None or (takes_more_than_text(config) and family_of(config) is not SPEECH):
        return f"the model is {_article(what)} {what}, which the ONNX export does not support"
    if keeps_states(config):
        return f"the model is {_article(what)} {what} with layers that keep a state, which the ONNX export does not support"
    return ""


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
