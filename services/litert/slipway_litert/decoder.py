"""A decoder whose KV cache of fixed size is passed in and out: a LiteRT program keeps nothing between two calls.

Axes: S = tokens of a call, L = places of the cache, H = heads, D = width of a head.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from litert_torch.generative.custom_ops.dynamic_update_slice import dynamic_update_slice
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from slipway_litert.files import KEYS, LOGITS, PLACES, TOKENS, VALUES

Shape = tuple[int, ...]


class Slots(CacheLayerMixin):
    """Keys and values of one layer, (1, H, L, D).

    All places are kept, also of a layer with a sliding window: its mask leaves the old ones out.
    """

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._places = keys, values, places
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of this call, which lie side by side; return those of all places."""
        none = torch.zeros((), dtype=self._places.dtype)
        start = [none, none, self._places[0], none]
        self.keys = dynamic_update_slice(self.keys, key_states, start)
        self.values = dynamic_update_slice(self.values, value_states, start)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the size is fixed
        """Return the number of places and the first one."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> Any:
        """Return the number of tokens before this call, a tensor without axes."""
        return self._places[0]

    def get_max_length(self) -> int:
        """Return the number of places."""
        assert self.keys is not None
        return self.keys.shape[2]


class StaticDecoder(torch.nn.Module):
    """A decoder with tensors alone as inputs and outputs, by their names in the program."""

    def __init__(self, model: Any, length: int) -> None:
        """Wrap a model.

        Raises:
            ValueError: The model keeps something else than keys and values, or takes no positions.
        """
        super().__init__()
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError("it takes no positions of tokens")
        self.model = model
        self.shapes = _cache_shapes(model, length)

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor, **cache: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return logits (1, S, vocabulary) and the cache. tokens: (1, S); input_pos: (S), places in a row."""
        slots = [
            Slots(cache[f"{KEYS}{layer}"], cache[f"{VALUES}{layer}"], input_pos)
            for layer in range(len(self.shapes) // 2)
        ]
        found = self.model(
            input_ids=tokens, position_ids=input_pos[None], past_key_values=Cache(layers=slots), use_cache=True
        )
        kept = {
            f"{name}{layer}": part
            for layer, each in enumerate(slots)
            for name, part in ((KEYS, each.keys), (VALUES, each.values))
        }
        return {LOGITS: found.logits, **kept}

    def sample(self, tokens: int) -> dict[str, torch.Tensor]:
        """Return inputs of a call with so many tokens."""
        return {
            TOKENS: torch.zeros(1, tokens, dtype=torch.int32),
            PLACES: torch.arange(tokens, dtype=torch.int32),
            **{name: torch.zeros(shape) for name, shape in self.shapes.items()},
        }


def _cache_shapes(model: Any, length: int) -> dict[str, Shape]:
    """Return the shapes of keys and values by their names, which only the model's code knows."""
    with torch.no_grad():
        past = model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=DynamicCache(), use_cache=True
        ).past_key_values
    layers = list(past.layers)
    odd = next((layer for layer in layers if not isinstance(layer, DynamicLayer) or layer.keys is None), None)
    if odd is not None or not layers:
        raise ValueError(f"its cache has a layer of the kind {type(odd).__name__}")
    return {
        f"{name}{number}": (*part.shape[:2], length, part.shape[3])
        for number, layer in enumerate(layers)
        for name, part in ((KEYS, layer.keys), (VALUES, layer.values))
    }
