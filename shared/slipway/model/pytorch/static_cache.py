"""A decoder with a KV cache of fixed size inside: tokens and their places go in, logits of these tokens come out."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

KEYS, VALUES = "keys_", "values_"


class Slots(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, (1, heads, length, width), written in place.

    All places are kept, also of a layer with a sliding window: its mask leaves the old ones out.
    """

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.places = keys, values, places
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of this call at their places; return all of them."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.places, key_states)
        self.values.index_copy_(2, self.places, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the size is fixed
        """Return the number of places and the first one."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> Any:
        """Return the number of tokens before this call, a tensor without axes."""
        return self.places[0]

    def get_max_length(self) -> int:
        """Return the number of places."""
        assert self.keys is not None
        return self.keys.shape[2]


class StaticDecoder(torch.nn.Module):
    """A decoder in the form that runtimes with a cache of their own call: ``forward(tokens, places)``."""

    def __init__(self, model: Any, length: int) -> None:
        """Wrap a model; its attention is chosen before.

        Raises:
            ValueError: The model keeps something else than keys and values, or takes no positions.
        """
        super().__init__()
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError("it takes no positions of tokens")
        self.model = model
        self.layers = 0
        for keys, values in keys_and_values(model):
            self.register_buffer(f"{KEYS}{self.layers}", keys.new_zeros(with_length(keys, length)), persistent=False)
            self.register_buffer(
                f"{VALUES}{self.layers}", values.new_zeros(with_length(values, length)), persistent=False
            )
            self.layers += 1

    def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
        """Return logits (1, S, vocabulary). input_ids: (1, S); cache_position: (S), places in a row."""
        slots = [
            Slots(getattr(self, f"{KEYS}{layer}"), getattr(self, f"{VALUES}{layer}"), cache_position)
            for layer in range(self.layers)
        ]
        output = self.model(
            input_ids=input_ids, position_ids=cache_position[None], past_key_values=Cache(layers=slots), use_cache=True
        )
        logits: torch.Tensor = output.logits
        return logits


def keys_and_values(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the keys and values of one token in each layer, whose shapes only the model's code knows.

    Raises:
        ValueError: The model keeps something else.
    """
    with torch.no_grad():
        past = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True).past_key_values
    layers = list(past.layers)
    odd = next((layer for layer in layers if not isinstance(layer, DynamicLayer)), None)
    if odd is not None or not layers:
        raise ValueError(f"its cache has a layer of the kind {type(odd).__name__}")
    return [(layer.keys, layer.values) for layer in layers]


def with_length(one: torch.Tensor, length: int) -> tuple[int, ...]:
    """Return the shape of keys or values, (1, heads, 1, width), with so many places."""
    return (*one.shape[:2], length, one.shape[3])
