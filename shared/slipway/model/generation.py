"""Read the settings of generation, and a model's special tokens, wherever transformers keeps them.

Up to version 4 transformers wrote them into ``config.json``. Version 5 writes the settings of generation, a decoder's first token among them, into
``generation_config.json``, and its classes of configurations lack those that they do not compute with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.model.configuration import ModelConfig
from slipway.model.model_files import GENERATION_CONFIG

_FIRST_TOKENS = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
"""Settings for the first token of a decoder; the first of them that is set decides."""
NO_FIRST_TOKEN = (
    f"neither {GENERATION_CONFIG} nor config.json names a first token for the decoder: set {_FIRST_TOKENS[0]}"
)


def generation_settings(folder: Path, config: Any = None) -> dict[str, Any]:
    """Return the settings of a model by name: those of ``generation_config.json``, otherwise of ``config.json``, otherwise of its class.

    Args:
        folder: The model's folder; a ``generation_config.json`` that cannot be read counts as absent, as it does for transformers.
        config: The model's configuration as transformers' object, for what its class sets itself.

    Raises:
        CheckpointValidationError: ``config.json`` cannot be read.
    """
    try:
        generation = read_json_object(folder / GENERATION_CONFIG, largest=LARGEST_LIST, lenient=True)
    except (OSError, ValueError):
        generation = {}
    sources: tuple[Mapping[str, Any], ...] = (
        config.to_dict() if config is not None else {},
        ModelConfig.read(folder),
        generation,
    )
    return {name: value for settings in sources for name, value in settings.items() if value is not None}


def first_token(settings: Mapping[str, Any]) -> int | None:
    """Return a decoder's first token; None if no setting names one."""
    return next((settings[name] for name in _FIRST_TOKENS if _is_token(settings.get(name))), None)


def token_of(config: Any, name: str) -> int | None:
    """Return a special token of transformers' configuration object; None if it has none, or several.

    A configuration of several parts keeps it in that of its text.
    """
    value = getattr(config, name, None)
    if value is None:
        value = getattr(config.get_text_config(), name, None)
    return value if _is_token(value) else None


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
