"""Stages by name. A distribution brings a stage by an entry point in the group ``slipway.stages``."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from slipway.errors import ConfigurationError
from slipway.stage import Stage

GROUP = "slipway.stages"
IMPORT = "import"
"""What workers themselves do for exports that only name their sources; no distribution brings it."""
_OWN = {IMPORT: "slipway.export_sources.import_stage:STAGE"}


def stage_names() -> tuple[str, ...]:
    """Names of all installed stages, sorted."""
    return tuple(sorted(entry_points(group=GROUP).names))


def load_stage(reference: str) -> Stage[Any]:
    """The stage of an installed name, or of a reference ``module:ATTRIBUTE``.

    Raises:
        ConfigurationError: reason ``STAGE_UNKNOWN``.
    """
    module, colon, attribute = _OWN.get(reference, reference).partition(":")
    try:
        if colon:
            stage = getattr(import_module(module), attribute)
        else:
            stage = entry_points(group=GROUP)[reference].load()
    except (KeyError, ImportError, AttributeError) as error:
        why = "" if isinstance(error, KeyError) else f": {error}"
        raise ConfigurationError(
            f"there is no stage {reference!r}{why}",
            reason="STAGE_UNKNOWN",
            remedy=f"installed stages are {', '.join(stage_names())}",
            about={"stage": reference},
        ) from error
    if not isinstance(stage, Stage):
        raise ConfigurationError(f"{reference} is not a stage", reason="STAGE_UNKNOWN", about={"stage": reference})
    return stage
