"""What a decoder's layers keep between calls, as inputs and outputs of its graph: keys and values, and states of fixed size.

Names are those of mobius and of onnxruntime-genai. ``past_key_values.N.key|value`` grow by a place for each token;
``past_key_values.N.conv_state|recurrent_state`` have one size and begin with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from slipway_onnx_export.interface import Port
from slipway_onnx_export.names import BATCH

KEY, VALUE, CONVOLUTION, RECURRENT = "key", "value", "conv_state", "recurrent_state"
_OF_ATTENTION = (KEY, VALUE)


class UnknownCacheError(Exception):
    """A model keeps something else than keys, values and states; the message says what."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that a layer keeps.

    Attributes:
        layer: Number of the layer.
        kind: ``key``, ``value``, ``conv_state`` or ``recurrent_state``.
        sizes: Its axes without batch and tokens; None where only the graph states them. Of keys and values (heads, head size), of a
            convolution (channels, places), of a recurrence the axes of its state.
    """

    layer: int
    kind: str
    sizes: tuple[int | None, ...]

    def port(self, pattern: str, length: str | int) -> Port:
        """Return the input or output: ``pattern`` has places for layer and kind in its name, ``length`` is the axis of tokens."""
        axes = (self.sizes[0], length, self.sizes[1]) if self.kind in _OF_ATTENTION else self.sizes
        return Port(pattern.format(self.layer, self.kind), (BATCH, *axes))


Layout = tuple[Kept, ...]
"""All that a model keeps, layer by layer."""


def layout_of(cache: Any) -> Layout:
    """Return what a model keeps, from the cache that it filled in a call.

    Raises:
        UnknownCacheError: It keeps something else.
    """
    layout = tuple(
        kept for number, layer in enumerate(getattr(cache, "layers", ())) for kept in _kept_by(layer, number)
    )
    if not layout:
        raise UnknownCacheError(f"a {type(cache).__name__}")
    return layout


def keys_and_values(layers: int) -> Layout:
    """Return the layout of a model with attention in all layers, whose sizes only the graph states."""
    return tuple(Kept(layer, kind, (None, None)) for layer in range(layers) for kind in _OF_ATTENTION)


def has_states(layout: Layout) -> bool:
    """Return whether some layer keeps a state of fixed size."""
    return any(kept.kind not in _OF_ATTENTION for kept in layout)


def ports_of(layout: Layout, pattern: str, length: str | int) -> tuple[Port, ...]:
    """Return the inputs or outputs for what a model keeps."""
    return tuple(kept.port(pattern, length) for kept in layout)


def cache_of(layout: Layout, tensors: Sequence[torch.Tensor], layers: int) -> Cache:
    """Return transformers' cache with these tensors, for a call of the model.

    Args:
        layout: What the tensors are.
        tensors: One for each.
        layers: Number of the model's layers.
    """
    kinds: list[dict[str, torch.Tensor]] = [{} for _ in range(layers)]
    for kept, tensor in zip(layout, tensors, strict=True):
        kinds[kept.layer][kept.kind] = tensor
    with_attention = [each for each in kinds if each]
    if not has_states(layout) and all(kinds[: len(with_attention)]):
        return DynamicCache([(each[KEY], each[VALUE]) for each in with_attention])
    return Cache(layers=[_layer_with(each) for each in kinds])


def tensors_of(cache: Any, layout: Layout, pattern: str) -> dict[str, torch.Tensor]:
    """Return what a call left in its cache, by the names of a graph's outputs."""
    return {pattern.format(kept.layer, kept.kind): _tensors(cache.layers[kept.layer])[kept.kind] for kept in layout}


class _States(LinearAttentionLayer):  # type: ignore[misc]
    """States that came with the call. New states are new tensors, because a graph does not write into its inputs."""

    def __init__(self, convolution: torch.Tensor | None, recurrent: torch.Tensor | None) -> None:
        super().__init__()
        self._hold(convolution, recurrent)

    def _hold(self, convolution: torch.Tensor | None, recurrent: torch.Tensor | None) -> None:
        self.conv_states[0], self.recurrent_states[0] = convolution, recurrent
        self.has_previous_state[0] = True

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Return the places so far and the new ones, and keep the last. conv_states: (batch, channels, tokens)."""
        past = self.conv_states[state_idx]
        assert past is not None
        places = torch.cat([past, conv_states], dim=-1)
        self.conv_states[state_idx] = places[..., places.shape[-1] - past.shape[-1] :]
        return places

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Keep the new state."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _StatesAndAttention(_States, DynamicLayer):  # type: ignore[misc]
    """States, with keys and values beside them."""

    def __init__(self, convolution: torch.Tensor | None, recurrent: torch.Tensor | None) -> None:
        DynamicLayer.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self)
        self._hold(convolution, recurrent)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Begin without keys and values."""
        DynamicLayer.lazy_initialization(self, key_states, value_states)


def _layer_with(kinds: Mapping[str, torch.Tensor]) -> Any:
    """Return a layer of a cache with its tensors.

    A layer that keeps nothing gets one for states: transformers reads the number of past tokens from the first with keys and values.
    """
    states = kinds.get(CONVOLUTION), kinds.get(RECURRENT)
    if KEY not in kinds:
        layer: Any = _States(*states)
    else:
        layer = DynamicLayer() if all(state is None for state in states) else _StatesAndAttention(*states)
        layer.update(kinds[KEY], kinds[VALUE])
    return layer


def _kept_by(layer: Any, number: int) -> Iterator[Kept]:
    """Yield what a layer keeps; one without attention and state keeps nothing."""
    if getattr(layer, "number_of_states", 1) != 1:
        raise UnknownCacheError(f"{layer.number_of_states} states in layer {number}")
    known = isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin)
    for kind, tensor in _tensors(layer).items():
        if kind in _OF_ATTENTION and tensor.dim() == 4:
            yield Kept(number, kind, (int(tensor.shape[1]), int(tensor.shape[3])))
        elif kind == CONVOLUTION and tensor.dim() == 3:
            # A convolution over K places needs K - 1 of the past; transformers keeps one more.
            yield Kept(number, kind, (int(tensor.shape[1]), int(tensor.shape[2]) - 1))
        elif kind == RECURRENT:
            yield Kept(number, kind, tuple(int(size) for size in tensor.shape[1:]))
        else:
            known = False
    if not known and type(layer).__name__ != "DummyLayer":
        raise UnknownCacheError(f"a cache of {type(layer).__name__}")


def _tensors(layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer by kind."""
    first = {
        kind: getattr(layer, name, {}).get(0)
        for kind, name in ((CONVOLUTION, "conv_states"), (RECURRENT, "recurrent_states"))
    }
    every = {KEY: getattr(layer, "keys", None), VALUE: getattr(layer, "values", None), **first}
    return {kind: tensor for kind, tensor in every.items() if isinstance(tensor, torch.Tensor)}
