"""The activations that a graph may be asked to return beside its results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from slipway.errors import ConfigurationError

Kind = Literal["hidden_states", "attentions", "cross_attentions", "mlp", "embeddings"]
Part = Literal["", "encoder", "decoder"]
"""Half of an encoder–decoder; empty for a model without halves."""

CROSS: Kind = "cross_attentions"
KINDS: Mapping[Kind, str] = {
    "hidden_states": "output of layer N, before any norm that follows the last layer",
    "attentions": "attention weights of layer N after the softmax, one map per head; a row is a query and sums to 1",
    CROSS: "attention weights of the decoder's layer N to the encoder's results, after the softmax; a row is a token of the decoder",
    "mlp": "output of the feed-forward part of layer N, as the module named below returns it",
    "embeddings": "input of the first layer: the tokens' embeddings, with positions and norms where the model has them",
}
"""Kinds of activations with their meanings."""

ALL, LAST = "all", "last"
MOST_LAYERS = 4096
_NUMBER = re.compile(r"\d{1,4}")


class Activation(NamedTuple):
    """One activation.

    Attributes:
        kind: Key of :data:`KINDS`.
        layer: Number of the layer; None if it belongs to none.
        part: Half of the model; only a decoder has cross-attention.
    """

    kind: Kind
    layer: int | None
    part: Part = ""

    @property
    def name(self) -> str:
        """Return the name of its output: ``attentions.3``, or ``encoder_attentions.3`` in an encoder–decoder, as transformers names them."""
        kind = f"{self.part}_{self.kind}" if self.part and self.kind != CROSS else self.kind
        return kind if self.layer is None else f"{kind}.{self.layer}"


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

    def choose_layers(self, count: int, *, most: int = 0) -> tuple[int, ...]:
        """Return the numbers of the layers in a part with ``count`` of them; another part of the model may have ``most``.

        Raises:
            ConfigurationError: ``PARAMS_INVALID``: the model has no such layer.
        """
        if ALL in self.layers:
            return tuple(range(count))
        numbers, most = {count - 1 if layer == LAST else int(layer) for layer in self.layers}, max(count, most)
        if numbers and max(numbers) >= most:
            raise ConfigurationError(
                f"activations of layer {max(numbers)} are asked for, and the model has {most} layers",
                reason="PARAMS_INVALID",
                remedy=f"use layers 0 to {most - 1}, last or all",
                about={"key": "activations.layers", "layers": most},
            )
        return tuple(sorted(number for number in numbers if number < count))

    def outputs(self, count: int, part: Part = "", *, most: int = 0) -> tuple[Activation, ...]:
        """Return every output of a part with ``count`` layers, in the order of the graph."""
        layers = self.choose_layers(count, most=most)
        activations: list[Activation] = []
        for kind in (kind for kind in KINDS if kind in self.kinds and (kind != CROSS or part == "decoder")):
            activations += [Activation(kind, layer, part) for layer in ((None,) if kind == "embeddings" else layers)]
        return tuple(activations)


def is_layer(value: str) -> bool:
    """Return whether a text names layers: a number, ``last`` or ``all``."""
    return value in (ALL, LAST) or (_NUMBER.fullmatch(value) is not None and int(value) < MOST_LAYERS)
