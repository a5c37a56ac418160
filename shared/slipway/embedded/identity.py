"""The id of an embedded export: the same configuration, sources and tools give the same id, so the same command resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from slipway.base_match import BaseMatch
from slipway.configuration import ExportConfiguration
from slipway.errors import ConfigurationError
from slipway.registry import load_stage, stage_names
from slipway.stage import installed_version


def export_identity(
    configuration: ExportConfiguration, digests: Mapping[str, str], *, base_match: BaseMatch | None
) -> str:
    """Twenty characters for the export of these sources with this configuration by the software installed here.

    What files tell of the base model is part of the answer: once it changes, the export is another one, made of the same
    stored results. How much is logged makes no other export; another version of a library does, since it may give other results.
    """
    document = {
        "configuration": configuration.model_dump(mode="json", exclude={"log"}),
        "sources": dict(sorted(digests.items())),
        "base_match": base_match.status.value if base_match else "",
        "software": {"slipway": installed_version("slipway"), **_stages()},
    }
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"e-{hashlib.sha256(canonical.encode()).hexdigest()[:18]}"


def _stages() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in stage_names():
        try:
            stage = load_stage(name)
        except ConfigurationError:  # its extra is not installed; an export that needs it says so
            continue
        found[name] = [stage.version, stage.library_versions(), [str(provider) for provider in stage.providers()]]
    return found
