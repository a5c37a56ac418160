"""Record how a decoder calls its layers, and return results in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from slipway_onnx_export.interface import Component
from slipway_onnx_export.loading.weightless import try_out

Tensors = dict[str, torch.Tensor]
Place = tuple[Any, ...]
"""Where a value is in a call: ``args`` and index, or ``kwargs`` and name, then the keys within tuples and dicts."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        args: Its arguments by order, the hidden states first.
        kwargs: Its arguments by name.
        result: Its result; None if the layer did not run.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any = None

    @property
    def hidden(self) -> Any:
        """Return the hidden states that it took."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    @property
    def returned(self) -> Any:
        """Return the hidden states that it returned."""
        return self.result[0] if isinstance(self.result, tuple) else self.result

    def at(self, place: Place) -> Any:
        """Return the value at a place."""
        value: Any = {"args": self.args, "kwargs": self.kwargs}
        for key in place:
            value = value[key]
        return value

    def places(self) -> Iterator[tuple[Place, Any]]:
        """Yield every value that is no collection, with its place."""
        yield from _leaves(("args",), self.args)
        yield from _leaves(("kwargs",), self.kwargs)


def _leaves(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves((*place, key), value[key])
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _leaves((*place, index), each)
    else:
        yield place, value


def replace_values(value: Any, replace: Callable[[Place], Any], place: Place) -> Any:
    """Return a copy of a collection in which ``replace`` gives each value by its place."""
    if isinstance(value, Mapping):
        return {key: replace_values(each, replace, (*place, key)) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(replace_values(each, replace, (*place, index)) for index, each in enumerate(value))
    return replace(place)


def watch(
    model: Any, decoder: Component, layers: Sequence[torch.nn.Module], sizes: Mapping[str, int]
) -> tuple[Tensors, list[LayerCall]]:
    """Run a decoder without computing anything; return its inputs and the calls of its layers.

    Args:
        model: Transformers model; its weights are not read.
        decoder: The component of the whole model.
        layers: Its layers.
        sizes: Size of each axis that varies.
    """
    assert decoder.call is not None
    call = decoder.call

    def run() -> tuple[Tensors, list[LayerCall]]:
        calls: list[LayerCall] = []

        def note(_module: Any, args: Any, kwargs: Any, result: Any) -> None:
            calls.append(LayerCall(args, kwargs, result))

        inputs = {
            port.name: torch.ones(
                [sizes[axis] if isinstance(axis, str) else axis or 1 for axis in port.shape], dtype=port.dtype
            )
            for port in decoder.inputs
        }
        handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
        try:
            call(model, inputs)
        finally:
            for handle in handles:
                handle.remove()
        return inputs, calls

    return try_out(model, run)


@contextmanager
def answer_calls(
    layers: Sequence[torch.nn.Module], forms: Sequence[LayerCall], hidden: torch.Tensor | None = None
) -> Iterator[list[LayerCall]]:
    """Make layers return hidden states without running: those that they take, or ``hidden``. Yield the list of their calls.

    Args:
        layers: The layers.
        forms: A call of each, whose result has the right form.
        hidden: Hidden states that all of them return; None for those that each takes.
    """
    calls: list[LayerCall] = []

    def answer(form: LayerCall) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(LayerCall(args, kwargs))
            states = calls[-1].hidden if hidden is None else hidden
            return (states, *[None] * (len(form.result) - 1)) if isinstance(form.result, tuple) else states

        return forward

    for layer, form in zip(layers, forms, strict=True):
        layer.__dict__["forward"] = answer(form)
    try:
        yield calls
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def is_cache(value: Any) -> bool:
    """Return whether an argument is the cache."""
    return isinstance(value, Cache)
