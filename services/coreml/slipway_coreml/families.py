"""Decide from ``config.json`` alone of which models packages are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.families import why_no_text_graph


def refusal_reason(config: Mapping[str, Any]) -> str:
    """Return why no package is made of a model with this ``config.json``; empty if one is."""
    return why_no_text_graph(config, "Core ML package")
