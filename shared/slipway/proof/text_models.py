"""Base classes of text models, to which a runtime only adds how one call is computed.

Axes as in :mod:`slipway.proof.runtime`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any

import numpy as np

from slipway.model.configuration import ModelConfig
from slipway.model.families import Comparison, Family
from slipway.model.sentences import SENTENCE_EMBEDDING
from slipway.proof.numerics import Logits
from slipway.proof.runtime import LanguageModel, NotRunnable, Past, Step, class_results


class TextReader(LanguageModel):
    """A model that reads a whole text in one call: an encoder, or a decoder with a classification head."""

    has_cache = False

    def read_as(self, family: Family, config: ModelConfig, outputs: Collection[str]) -> None:
        """Set what its results mean.

        Args:
            family: Its family.
            config: Its configuration.
            outputs: Names of all outputs.
        """
        self._family, self._several_labels = family, config.has_several_labels
        self.embeds = SENTENCE_EMBEDDING in outputs

    @abstractmethod
    def results(self, step: Step, names: tuple[str, ...]) -> list[Logits]:
        """Return outputs of one call by name, in float32."""

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        values = self.results(step, self._family.outputs)
        if self._family.comparison is Comparison.SPANS:
            return np.stack(values, axis=1), None
        if self._family.comparison is Comparison.CLASSES:
            return class_results(values[0], several_labels=self._several_labels), None
        return values[0], None

    def embed(self, step: Step) -> Logits:
        """As :meth:`slipway.proof.runtime.LanguageModel.embed`."""
        return self.results(step, (SENTENCE_EMBEDDING,))[0][:, None]


class RowDecoder(LanguageModel):
    """A decoder that takes one row of tokens after another, and whose cache has room for ``length`` tokens."""

    has_cache = True
    length: int

    @abstractmethod
    def empty(self) -> Any:
        """Return the state of a row without tokens."""

    @abstractmethod
    def extend(self, state: Any, start: int, tokens: list[int]) -> tuple[Logits, Any]:
        """Return logits, (S, V), of the tokens at the places from ``start`` on, and the state of the row with them."""

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        new = step.attention_mask[:, -step.input_ids.shape[1] :].astype(bool)
        before = step.past or [(0, self.empty()) for _ in new]
        results, past = [], []
        for row, (ids, real) in enumerate(zip(step.input_ids, new, strict=True)):
            tokens = [int(token) for token in ids[real]]
            start, state = before[row]
            total = start + len(tokens)
            if list(step.position_ids[row][real]) != list(range(start, total)):
                raise NotRunnable("the program takes tokens at places in a row only")
            if total > self.length:
                raise NotRunnable(
                    f"its KV cache has room for {self.length} tokens, and the samples have {total}: set max_length of the export to that or more"
                )
            row_logits, state = self.extend(state, start, tokens)
            logits = np.zeros((len(ids), row_logits.shape[-1]), dtype=np.float32)
            logits[real] = row_logits
            results.append(logits)
            past.append((total, state))
        return np.stack(results), past
