"""Models that read a whole text in one call, with tensors alone as inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch

from slipway.model.families import Family
from slipway.model.sentences.pooling import Pooling, pool


class TextReader(torch.nn.Module):
    """A model of a text: ``forward(tokens, mask)``, and the tokens' types if the model has several."""

    def __init__(self, model: Any, family: Family, pooling: Pooling | None) -> None:
        super().__init__()
        self.model, self._outputs, self._pooling = model, family.outputs, pooling

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the family, and then the sentence embedding if the model has one. All inputs: (1, S)."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
        results = tuple(getattr(found, name) for name in self._outputs)
        if self._pooling is None:
            return results
        return (*results, pool(results[0], attention_mask, self._pooling))


def has_token_types(config: Any) -> bool:
    """Return whether the model tells texts of a pair apart."""
    return (getattr(config, "type_vocab_size", 0) or 0) > 1
