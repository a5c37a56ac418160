"""The YAML that makes what is recommended, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from slipway.advice.candidates import Candidate
from slipway.configuration import ExportConfiguration


def sections_for(candidate: Candidate) -> dict[str, dict[str, Any]]:
    """Return the sections of formats that make a candidate and nothing else: what is enabled by default is switched off."""
    section: dict[str, Any] = {"enabled": True}
    if candidate.level:
        section |= {"unquantized": False, "quantization": [candidate.level]}
    section |= candidate.settings
    enabled: dict[str, dict[str, Any]] = {
        name: {"enabled": False} for name in _enabled_by_default() if name != candidate.format
    }
    return {**enabled, candidate.format: section}


def settings_for(candidate: Candidate, target: str, *, model: str = "") -> str:
    """Return a configuration as YAML that makes a candidate and nothing else."""
    document: dict[str, Any] = {"base_model": {"name": model}} if model else {}
    document |= {"formats": sections_for(candidate), "output": {"target": target}}
    return yaml.safe_dump({"export": document}, sort_keys=False, default_flow_style=None, width=1 << 20)


def _enabled_by_default() -> Iterable[str]:
    defaults = ExportConfiguration().formats
    return [each.name for each, _ in defaults.enabled()]
