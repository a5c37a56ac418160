"""The activations that a graph may be asked to return beside its results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slipway.errors import ConfigurationError

Kind = Literal["hidden_states", "attentions", "mlp", "embeddings"]

KINDS: Mapping[Kind, str] = {
    "hidden_states": "output of layer N, before any norm that follows the last layer",
    "attentions": "attention weights of layer N after the softmax, one map per head; a row is a query and sums to 1",
    "mlp": "output of the feed-forward part of layer N, as the module named below returns it",
    "embeddings": "input of the first layer: the tokens' embeddings, with positions and norms where the model has them",
}
"""Kinds of activations with their meanings."""

ALL, LAST = "all", "last"
MOST_LAYERS = 4096
_NUMBER = re.compile(r"\d{1,4}")


def activation_name(kind: Kind, layer: int | None) -> str:
    """Return the name of an output."""
    return kind if layer is None else f"{kind}.{layer}"


@dataclass(frozen=True, slots=True)
class ActivationRequest:
    """The activations that are asked for.

    Attributes:
        layers: Numbers of layers from 0, ``("all",)`` or ``("last",)``.
        kinds: Keys of :data:`KINDS`.
    """

    layers: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, table: Mapping[Any, Sequence[str]]) -> ActivationRequest | None:
        """Read the table of a setting or parameter; None if it asks for nothing."""
        if not table:
            return None
        return cls(tuple(table.get("layers") or (ALL,)), tuple(table.get("kinds") or ("hidden_states",)))

    def chosen(self, count: int) -> tuple[int, ...]:
        """Return the numbers of the layers in a model with ``count`` of them.

        Raises:
            ConfigurationError: ``PARAMS_INVALID``: the model has no such layer.
        """
        if ALL in self.layers:
            return tuple(range(count))
        numbers = {count - 1 if layer == LAST else int(layer) for layer in self.layers}
        if numbers and max(numbers) >= count:
            raise ConfigurationError(
                f"activations of layer {max(numbers)} are asked for, and the model has {count} layers",
                reason="PARAMS_INVALID",
                remedy=f"use layers 0 to {count - 1}, last or all",
                about={"key": "activations.layers", "layers": count},
            )
        return tuple(sorted(numbers))

    def outputs(self, count: int) -> tuple[tuple[Kind, int | None], ...]:
        """Return kind and layer of every output for a model with ``count`` layers, in the order of the graph."""
        layers = self.chosen(count)
        found: list[tuple[Kind, int | None]] = []
        for kind in (kind for kind in KINDS if kind in self.kinds):
            found += [(kind, None)] if kind == "embeddings" else [(kind, layer) for layer in layers]
        return tuple(found)


def is_layer(value: str) -> bool:
    """Return whether a text names layers: a number, ``last`` or ``all``."""
    return value in (ALL, LAST) or (_NUMBER.fullmatch(value) is not None and int(value) < MOST_LAYERS)
