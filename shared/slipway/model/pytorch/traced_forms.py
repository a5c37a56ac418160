"""Forms of a model that can be traced: rotary embeddings, attention of a format's own, a cache of fixed size.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of this call, L = places of keys, D = width of a head.

Rotary embeddings: where the frequencies depend on the longest text (dynamic NTK scaling, LongRoPE), transformers' code keeps them in
a buffer that it changes between calls, and decides by a branch on values whether to. A tracer loses the branch or refuses it. So a
trace computes them from the positions of each call.

Attention: a format's runtime computes its own form in place of transformers'.

Cache: it is inside the decoder. Tokens and their places go in, logits of these tokens come out.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipway.model.limits import GROWING, SWITCHING

_HARMLESS = ("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "output_attentions")
"""Arguments that are already in the mask or the cache."""

KEYS, VALUES = "keys_", "values_"


def compute_frequencies_in_graph(model: torch.nn.Module) -> None:
    """Make a model's rotary embeddings functions of the positions, in place.

    A call gives what transformers' code gives for it after shorter texts.
    """
    for module in _changing_modules(model):
        module.forward = partial(_rotate, module, inspect.unwrap(type(module).forward))


def forget_longest_text(model: torch.nn.Module) -> None:
    """Reset rotary embeddings that have seen a long text.

    Without this, transformers' code gives a later text the frequencies of the longest one before it, unless it is shorter than
    those of the training.
    """
    first = torch.zeros(1, 1, dtype=torch.int64)
    for module in _changing_modules(model):
        for layers in _rope_kinds(module):
            module(first.float(), first, *([] if layers is None else [layers]))


def _changing_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules whose ``forward`` transformers wraps to change their frequencies."""
    for module in model.modules():
        wrapped = inspect.unwrap(type(module).forward) is not type(module).forward
        if wrapped and any(kind in (GROWING, SWITCHING) for kind in _rope_kinds(module).values()):
            yield module


def _rope_kinds(module: Any) -> dict[str | None, str]:
    """Return the type of a module's rotary embeddings by the type of its layers, or that for all layers under None."""
    kinds = getattr(module, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {None: str(kinds)}


def _rotate(
    module: Any, forward: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a module's own code with the frequencies of this call. x gives the type; position_ids: (..., tokens)."""
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    before = module._buffers[name]
    module._buffers[name] = _frequencies(module, layer_type, position_ids)
    try:
        with torch.no_grad():
            return forward(module, x, position_ids, *([] if layer_type is None else [layer_type]))
    finally:
        module._buffers[name] = before


def _frequencies(module: Any, layer_type: str | None, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the frequencies for the longest text of a call, (size of a head / 2)."""
    kind, config = _rope_kinds(module)[layer_type], module.config
    original: torch.Tensor = getattr(
        module, "original_inv_freq" if layer_type is None else f"{layer_type}_original_inv_freq"
    )
    if kind not in (GROWING, SWITCHING):
        return original
    settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    longest = position_ids.max() + 1
    trained: int = config.max_position_embeddings if kind == GROWING else settings["original_max_position_embeddings"]
    # The second set of LongRoPE is a constant; the frequencies of dynamic scaling are a function of the length.
    length = longest if kind == GROWING else trained + 1
    with warnings.catch_warnings():
        # The function makes tensors of settings only, which are the same in every call.
        warnings.filterwarnings("ignore", "torch.tensor results are registered as constants")
        beyond, _ = ROPE_INIT_FUNCTIONS[kind](config, position_ids.device, seq_len=length, layer_type=layer_type)
    return torch.where(longest > trained, beyond, original)


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
