"""Describe a model for a recommendation: its family, its size and the size of its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.estimates import ModelSize
from slipway.model.configuration import ModelConfig
from slipway.model.model_files import resolve_base_model
from slipway.planning.preflight import model_size

CONTEXT = 4096
"""Context length for which the cache is estimated, in tokens; the model's own limit if that is lower."""
_CACHE_VALUE_BYTES = 2
_MOST = 1 << 20
"""Larger numbers of a configuration are not believed."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model.

    Attributes:
        folder: Its folder.
        family: Name of its family; empty if none fits.
        size: Its size.
        cache_bytes: Keys and values of :data:`CONTEXT` tokens in 16 bits; 0 for a model without a cache.
        config: Its ``config.json``.
    """

    folder: Path
    family: str
    size: ModelSize
    cache_bytes: int
    config: ModelConfig = field(default_factory=lambda: ModelConfig({}))

    @classmethod
    def read(cls, name: str, *, config: ModelConfig | None = None) -> Subject:
        """Read a model by the headers of its files.

        Args:
            name: Its folder, or its id in the local cache.
            config: Its configuration, if it is not that in the folder: a fine-tune may bring a head of another kind.

        Raises:
            CheckpointValidationError: It is no model folder.
        """
        folder = resolve_base_model(name)
        config = ModelConfig.read(folder) if config is None else config
        family = config.family
        cached = family is not None and family.generates
        return cls(
            folder, family.name if family else "", model_size(folder), _cache_bytes(config) if cached else 0, config
        )


def _cache_bytes(model: ModelConfig) -> int:
    config = {**model, **model.text}
    layers = _number(config, "num_hidden_layers", "n_layer", "decoder_layers", "num_layers")
    heads = _number(config, "num_attention_heads", "n_head", "decoder_attention_heads", "num_heads")
    kept = _number(config, "num_key_value_heads") or heads
    width = _number(config, "hidden_size", "n_embd", "d_model")
    each = _number(config, "head_dim") or (width // heads if heads else 0)
    context = min(CONTEXT, _number(config, "max_position_embeddings", "n_positions") or CONTEXT)
    return 2 * layers * kept * each * context * _CACHE_VALUE_BYTES


def _number(config: Mapping[str, Any], *names: str) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and 0 < value <= _MOST), 0)
