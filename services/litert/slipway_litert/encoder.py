"""Models that read a whole text in one call, with tensors alone as inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch

from slipway.model.families import Family
from slipway.model.sentences.pooling import SENTENCE_EMBEDDING, Pooling, pool


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
        found = self.model(**given)
        results = {name: getattr(found, name) for name in self._family.outputs}
        if self._pooling is not None:
            hidden = results[self._family.outputs[0]]
            results[SENTENCE_EMBEDDING] = pool(hidden, given["attention_mask"], self._pooling)
        return results

    def sample(self, places: int) -> dict[str, torch.Tensor]:
        """Return inputs of a call with so many places."""
        ids = torch.zeros(1, places, dtype=torch.int32)
        values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        return {name: values[name] for name in self.inputs}
