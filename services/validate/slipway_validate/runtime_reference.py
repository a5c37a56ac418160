"""Runs base + adapter, unmerged, by transformers and peft in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch

from slipway_validate.adapter_names import take_all
from slipway_validate.folders import stored_dtype
from slipway_validate.model import Unusable
from slipway_validate.runtime_transformers import TransformersModel, from_pretrained


class ReferenceModel(TransformersModel):
    """The reference, whose adapter can be switched off."""

    def __init__(self, module: Any, *, stored: str) -> None:
        super().__init__(module, stored=stored)
        config = module.peft_config["default"]
        kind = getattr(config.peft_type, "value", config.peft_type)
        rank, alpha = getattr(config, "r", "?"), getattr(config, "lora_alpha", "?")
        self.adapter = f"{kind} r={rank} alpha={alpha}, peft {peft.__version__}"

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The base model alone, for as long as the context lasts."""
        with self._module.disable_adapter():
            yield


def load(base: Path, adapter: Path, *, threads: int) -> ReferenceModel:
    """Base + adapter.

    Raises:
        Unusable: Base or adapter cannot be loaded, or they do not fit together.
    """
    torch.set_num_threads(threads)
    module = from_pretrained(base, dtype=torch.float32)
    try:
        module = peft.PeftModel.from_pretrained(module, str(adapter), is_trainable=False)
        take_all(module, adapter)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise Unusable(f"peft cannot put the adapter {adapter.name!r} on the base model: {error}") from error
    _name_replicated_layers(module)
    return ReferenceModel(module.float(), stored=stored_dtype(base))


def _name_replicated_layers(module: peft.PeftModel) -> None:
    """Tell a model that peft made deeper (``layer_replication``) of which kind each layer is.

    peft changes the number of layers only; a model's cache and attention masks go by ``layer_types``.
    """
    ranges = getattr(module.peft_config["default"], "layer_replication", None)
    config = module.get_base_model().config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if ranges and kinds:
        config.layer_types = [kinds[number] for first, end in ranges for number in range(first, end)]
