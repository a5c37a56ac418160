"""Say for which outputs the reference's results in other shapes speak: those that run its code with its configuration.

Which shapes a model gives wrong results in depends on how its code pads, masks, counts positions and keeps a cache, as its configuration says.
Its weights are compared by the windows. Where activations are rounded too, a row may depend on its neighbours, so nothing is known then.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.formats import Runtime
from slipway.model.model_files import CONFIG
from slipway_validate.folders import read_json

REFERENCE_CODE = "slipway_validate.runner.runtime_transformers:load"
SAME_CODE = "the reference runs the same code with the same configuration, and was compared with itself in this shape"
_ABOUT_WEIGHTS = frozenset(
    {"_name_or_path", "dtype", "quantization_config", "tie_word_embeddings", "torch_dtype", "transformers_version"}
)
"""Settings that say how weights are stored, and nothing of shapes."""


def why_shapes_are_known(runtime: Runtime | None, model: Path, settings: Path) -> str:
    """Return why the reference's shape cases speak for an output; empty if they do not.

    Args:
        runtime: Runtime of the output.
        model: Folder of the output.
        settings: Folder with the configuration of what the adapter was trained on.
    """
    own, theirs = read_json(model / CONFIG), read_json(settings / CONFIG)
    packed = own.get("quantization_config") or {}
    if runtime is None or runtime.load != REFERENCE_CODE or not own or _rounds_while_computing(packed):
        return ""
    return SAME_CODE if _of_code(own) == _of_code(theirs) else ""


def _rounds_while_computing(packed: Any) -> bool:
    """Return whether activations or the cache are rounded, or whether that cannot be told."""
    if not packed:
        return False
    groups = packed.get("config_groups", {}) if isinstance(packed, dict) else None
    if not isinstance(groups, dict) or packed.get("kv_cache_scheme") is not None:
        return True
    return any(
        not isinstance(group, dict) or group.get("input_activations") or group.get("output_activations")
        for group in groups.values()
    )


def _of_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what the code does, those of a part of the model included."""
    return {
        name: _of_code(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _ABOUT_WEIGHTS
    }
