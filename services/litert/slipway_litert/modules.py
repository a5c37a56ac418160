"""Load a merged model in float32, and make of it the modules that become programs: a decoder, or a reader of a text.

A LiteRT program keeps nothing between two calls, so a decoder's cache of fixed size is passed in and out. A reader gets a whole text in
one call. Attention is few products of fixed shapes: keys and values are not copied for each head of queries that shares them.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of a call, L = places of the cache, D = width of a head.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from litert_torch.generative.custom_ops.dynamic_update_slice import dynamic_update_slice
from transformers.cache_utils import Cache

from slipway.errors import LiteRtExportError
from slipway.model.configuration import token_of
from slipway.model.families import Family
from slipway.model.pytorch.text_model import TextModel, open_text_model
from slipway.model.pytorch.traced_forms import Slots, keys_and_values, use_attention, with_length
from slipway.model.sentences import SENTENCE_EMBEDDING, Pooling, pool
from slipway_litert.params import KEYS, LOGITS, PLACES, PRODUCT, TOKENS, VALUES

ATTENTION_NAME = "slipway_litert"

Shape = tuple[int, ...]


def open_source(folder: Path) -> TextModel:
    """Load the model of a folder.

    Raises:
        LiteRtExportError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    source = open_text_model(
        folder, lambda config: config.why_no_text_graph(PRODUCT), title="LiteRT", error=LiteRtExportError
    )
    use_attention(source.model, ATTENTION_NAME, attend)
    return source


def padding_of(source: TextModel) -> int:
    """Return the padding token; 0 if the model has none."""
    return token_of(source.model.config, "pad_token_id") or 0


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend to masked places. query: (1, H, S, D); key, value: (1, G, L, D); attention_mask: (1, 1, S, L); result: (1, S, H, D)."""
    (_, heads, tokens, width), (_, groups, places, _) = query.shape, key.shape
    scale = width**-0.5 if scaling is None else scaling
    shared = (query * scale).reshape(1, groups, -1, width)  # (1, G, H/G · S, D)
    scores = (shared @ key.transpose(2, 3)).reshape(1, heads, tokens, places)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1).reshape(1, groups, -1, places)
    result = (weights @ value).reshape(1, heads, tokens, value.shape[3])
    return result.transpose(1, 2)


class PassedSlots(Slots):
    """Keys and values of one layer, (1, G, L, D). A call returns them instead of writing them in place."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this call's keys and values at consecutive positions; return those of all positions."""
        none = torch.zeros((), dtype=self.places.dtype)
        start = [none, none, self.places[0], none]
        self.keys = dynamic_update_slice(self.keys, key_states, start)
        self.values = dynamic_update_slice(self.values, value_states, start)
        return self.keys, self.values


class StaticDecoder(torch.nn.Module):
    """A decoder whose inputs and outputs are tensors with the names that they have in the program."""

    def __init__(self, model: Any, length: int) -> None:
        """Wrap a model.

        Raises:
            ValueError: The model's cache is not keys and values, or it takes no positions.
        """
        super().__init__()
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError("it takes no positions of tokens")
        self.model = model
        self.shapes = _cache_shapes(model, length)

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor, **cache: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return logits (1, S, vocabulary) and the cache. tokens: (1, S); input_pos: (S), consecutive positions."""
        slots = [
            PassedSlots(cache[f"{KEYS}{layer}"], cache[f"{VALUES}{layer}"], input_pos)
            for layer in range(len(self.shapes) // 2)
        ]
        output = self.model(
            input_ids=tokens, position_ids=input_pos[None], past_key_values=Cache(layers=slots), use_cache=True
        )
        kept = {
            f"{name}{layer}": part
            for layer, each in enumerate(slots)
            for name, part in ((KEYS, each.keys), (VALUES, each.values))
        }
        return {LOGITS: output.logits, **kept}

    def sample(self, tokens: int) -> dict[str, torch.Tensor]:
        """Return inputs of a call with this many tokens."""
        return {
            TOKENS: torch.zeros(1, tokens, dtype=torch.int32),
            PLACES: torch.arange(tokens, dtype=torch.int32),
            **{name: torch.zeros(shape) for name, shape in self.shapes.items()},
        }


def _cache_shapes(model: Any, length: int) -> dict[str, Shape]:
    """Return the shapes of keys and values by their names."""
    return {
        f"{name}{number}": with_length(part, length)
        for number, (keys, values) in enumerate(keys_and_values(model))
        for name, part in ((KEYS, keys), (VALUES, values))
    }


class TextReader(torch.nn.Module):
    """A model of a text: ``forward(input_ids, attention_mask)``, and ``token_type_ids`` if the model has several types."""

    def __init__(self, model: Any, family: Family, pooling: Pooling | None) -> None:
        super().__init__()
        self.model, self._family, self._pooling = model, family, pooling
        types = (getattr(model.config, "type_vocab_size", 0) or 0) > 1
        self.inputs = ("input_ids", "attention_mask", *(("token_type_ids",) if types else ()))
        self.outputs = (*family.outputs, *((SENTENCE_EMBEDDING,) if pooling else ()))

    def forward(self, **given: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs of the family, and the sentence embedding if the model has one. All inputs: (1, S)."""
        output = self.model(**given)
        results = {name: getattr(output, name) for name in self._family.outputs}
        if self._pooling is not None:
            hidden = results[self._family.outputs[0]]
            results[SENTENCE_EMBEDDING] = pool(hidden, given["attention_mask"], self._pooling)
        return results

    def sample(self, places: int) -> dict[str, torch.Tensor]:
        """Return inputs of a call with this many positions."""
        ids = torch.zeros(1, places, dtype=torch.int32)
        values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        return {name: values[name] for name in self.inputs}
