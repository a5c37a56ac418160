"""Load a merged model in the type of its graph, and define interfaces: modules whose inputs and outputs are tensors only, and inputs.

Axes: B = batch, S = tokens of this call, P = tokens before it, H = heads, D = width of a head.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from slipway.errors import TorchGraphError, is_own_fault
from slipway.model.configuration import token_of
from slipway.model.families import (
    DECODER,
    FEATURE_EXTRACTION,
    MASKED_LANGUAGE_MODEL,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    Family,
)
from slipway.model.pytorch.text_model import TextModel, open_text_model
from slipway.model.sentences import SENTENCE_EMBEDDING, Pooling, pool
from slipway.proof.comparison import Case
from slipway_torchscript.params import refusal_reason

Tensors = tuple[Any, ...]
"""Inputs of a call: tensors, and for a decoder a list of keys and values last."""
PER_TOKEN = (TOKEN_CLASSIFIER, QUESTION_ANSWERING, MASKED_LANGUAGE_MODEL, FEATURE_EXTRACTION)
"""Families whose outputs are per token, except the sentence embedding."""

LONGEST_PROOF = 512
"""Longest text in the comparison with PyTorch."""


class CachedDecoder(torch.nn.Module):
    """A decoder: ``forward(tokens, mask, positions, past)`` returns logits and the extended keys and values."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return logits (B, S, V), and keys and values (B, H, P + S, D). past: keys, values of each layer, (B, H, P, D)."""
        positions = {"position_ids": position_ids} if self._positions else {}
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=DynamicCache(list(zip(past[::2], past[1::2], strict=True))),
            use_cache=True,
            **positions,
        )
        return output.logits, [part for layer in output.past_key_values.layers for part in (layer.keys, layer.values)]


class TextReader(torch.nn.Module):
    """A model that reads a whole text: ``forward(tokens, mask)``, and token types if the model has several."""

    def __init__(self, model: Any, family: Family, pooling: Pooling | None) -> None:
        super().__init__()
        self.model, self._outputs, self._pooling = model, family.outputs, pooling

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the family's outputs, then the sentence embedding if the model has one. All inputs: (B, S)."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
        results = tuple(output[name] for name in self._outputs)
        if self._pooling is None:
            return results
        return (*results, pool(results[0], attention_mask, self._pooling))


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of a graph.

    Attributes:
        module: The module that is traced.
        inputs: Names of the inputs, in order; ``past`` is a list of tensors.
        outputs: Names of the outputs, in order; ``present`` is a list of tensors.
        cache: (H, D) of each tensor of ``past``.
        per_token: Names of outputs with results of every token, (B, S, ...).
        one_row: Whether the model takes only one text at a time.
        vocabulary: Number of tokens.
        padding: Padding token.
        dtype: Type of keys and values.
    """

    module: torch.nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cache: tuple[tuple[int, int], ...]
    per_token: frozenset[str]
    one_row: bool
    vocabulary: int
    padding: int
    dtype: torch.dtype

    def feeds(self, case: Case) -> Tensors:
        """Return inputs for a case: random tokens, padded on the left for decoders and on the right for others."""
        generator = torch.Generator().manual_seed(case.sequence)
        total = case.past + case.sequence
        ids = torch.randint(3, self.vocabulary, (case.batch, total), generator=generator)
        mask = torch.ones(case.batch, total, dtype=torch.int64)
        for row, padding in enumerate(case.padding):
            places = slice(0, padding) if self.cache else slice(total - padding, total)
            mask[row, places] = 0
            ids[row, places] = self.padding
        if not self.cache:
            types = [torch.randint(0, 2, ids.shape, generator=generator)] if "token_type_ids" in self.inputs else []
            return (ids, mask, *types)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        past = self.empty(case.batch)
        if case.past:
            before = slice(0, case.past)
            _, past = self.module(ids[:, before].clone(), mask[:, before].clone(), positions[:, before].clone(), past)
        # Copies, because torch.export would treat a view's size as fixed.
        return ids[:, case.past :].clone(), mask, positions[:, case.past :].clone(), [each.clone() for each in past]

    def empty(self, batch: int) -> list[torch.Tensor]:
        """Return empty keys and values."""
        return [torch.zeros(batch, heads, 0, width, dtype=self.dtype) for heads, width in self.cache]


def interface_of(source: TextModel, pooling: Pooling | None) -> Interface:
    """Return the interface of a model.

    Raises:
        TorchGraphError: ``FAMILY_UNSUPPORTED`` if its cache is not keys and values of attention.
    """
    config, family = source.model.config, source.family
    settings = config.get_text_config()
    padding = token_of(settings, "pad_token_id")
    sizes = int(settings.vocab_size), padding or 0
    if family is DECODER:
        cache = _cache(source.model)
        names = ("input_ids", "attention_mask", "position_ids", "past")
        return Interface(
            CachedDecoder(source.model),
            names,
            ("logits", "present"),
            cache,
            frozenset({"logits"}),
            False,
            *sizes,
            source.model.dtype,
        )
    accepted = inspect.signature(source.model.forward).parameters
    types = "token_type_ids" in accepted and (getattr(config, "type_vocab_size", 0) or 0) > 1
    names = ("input_ids", "attention_mask", *(("token_type_ids",) if types else ()))
    outputs = (*family.outputs, *((SENTENCE_EMBEDDING,) if pooling else ()))
    per_token = frozenset(family.outputs) if family in PER_TOKEN else frozenset()
    # A decoder with a classifier needs a padding token to find the last token, and refuses several texts without one.
    alone = family is SEQUENCE_CLASSIFIER and padding is None and source.model.get_decoder() is not source.model
    module = TextReader(source.model, family, pooling)
    return Interface(module, names, outputs, (), per_token, alone, *sizes, source.model.dtype)


def _cache(model: Any) -> tuple[tuple[int, int], ...]:
    """Return (H, D) of keys and values in each layer; only a call of the model tells them."""
    with torch.no_grad():
        try:
            past = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=DynamicCache(), use_cache=True)
        except Exception as error:  # the model's own code may raise anything
            if is_own_fault(error):
                raise
            raise _strange(
                model, f"does not take keys and values of attention ({type(error).__name__}: {error})"
            ) from error
    layers = list(getattr(getattr(past, "past_key_values", None), "layers", ()))
    odd = next((each for each in layers if not isinstance(each, DynamicLayer) or each.keys is None), None)
    if odd is not None or not layers:
        raise _strange(model, f"has a cache of {type(odd).__name__} instead of keys and values of attention")
    return tuple((int(part.shape[1]), int(part.shape[3])) for layer in layers for part in (layer.keys, layer.values))


def _strange(model: Any, what: str) -> Exception:
    return unsupported(f"{type(model).__name__} {what}", architecture=type(model).__name__)


def open_source(folder: Path, *, title: str, dtype: torch.dtype, attention: str) -> TextModel:
    """Load the model of a folder.

    Raises:
        TorchGraphError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    return open_text_model(folder, refusal_reason, title=title, error=TorchGraphError, dtype=dtype, attention=attention)


def unsupported(why: str, **about: object) -> TorchGraphError:
    """Return the error for a model that cannot become a graph."""
    return TorchGraphError(
        why, reason="FAMILY_UNSUPPORTED", remedy="leave this format out for this model", about=dict(about)
    )
