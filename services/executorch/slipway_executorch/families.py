"""Decide from ``config.json`` alone of which models programs are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.families import TEXT_FAMILIES, why_no_text_graph

TAKEN = TEXT_FAMILIES
"""Families that are exported."""


def refusal_reason(config: Mapping[str, Any]) -> str:
    """Return why no program is made of a model with this ``config.json``; empty if one is."""
    return why_no_text_graph(config, "ExecuTorch program")
