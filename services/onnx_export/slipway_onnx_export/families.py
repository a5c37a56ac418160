"""Decide from ``config.json`` alone which models can be exported: so far text decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.models.families import DECODER, described, family_of, takes_more_than_text


def refusal_reason(config: Mapping[str, Any]) -> str:
    """Return why a model is not exported; empty if it is."""
    if family_of(config) is DECODER and not takes_more_than_text(config):
        return ""
    what = described(config)
    return f"the model is {'an' if what[0] in 'aeiou' else 'a'} {what}, and the ONNX export supports text decoders only"
