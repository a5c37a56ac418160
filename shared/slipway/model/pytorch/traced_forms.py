"""Forms of a model that can be traced: attention of a format's own, a cache of fixed size.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of this call, L = places of keys, D = width of a head.

Attention: a format's runtime computes its own form in place of transformers'.

Cache: it is inside the decoder. Tokens and their places go in, logits of these tokens come out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, eager_mask

_HARMLESS = ("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "output_attentions")
"""Arguments that are already in the mask or the cache."""

KEYS, VALUES = "keys_", "values_"


class Attend(Protocol):
    """Computes attention of one row; a format's own, which is traced."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Return (1, S, H, D). query: (1, H, S, D); key, value: (1, G, L, D); attention_mask: (1, 1, S, L), added to scores.

        ``scaling`` is None for that of the width, D ** -0.5; ``softcap`` caps scores by tanh.
        """
        ...


def use_attention(
    model: Any,
    name: str,
    attend: Attend,
    *,
    mask: Callable[..., torch.Tensor] = eager_mask,
    unread: Collection[str] = (),
) -> None:
    """Make a transformers model use attention of our own, unless its class computes attention itself.

    Args:
        model: The model.
        name: Name under which transformers knows the attention.
        attend: Computes it.
        mask: Makes its mask, as transformers' mask functions do.
        unread: Further arguments that classes pass and no attention reads.
    """
    AttentionInterface.register(name, _as_transformers_calls(attend, (*_HARMLESS, *unread)))
    AttentionMaskInterface.register(name, mask)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def use_transformers_attention(model: Any) -> None:
    """Make a model use transformers' own attention again."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")


def _as_transformers_calls(attend: Attend, harmless: Collection[str]) -> Callable[..., tuple[torch.Tensor, None]]:
    def attention(
        module: torch.nn.Module,  # noqa: ARG001 - part of the interface, as dropout
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,  # noqa: ARG001
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend.

        Raises:
            ValueError: The model needs more than masked, scaled and capped products.
        """
        odd = sorted(name for name, given in others.items() if given is not None and name not in harmless)
        if odd:
            raise ValueError(f"its attention takes {odd[0]}")
        return attend(query, key, value, attention_mask, scaling=scaling, softcap=softcap), None

    return attention


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
