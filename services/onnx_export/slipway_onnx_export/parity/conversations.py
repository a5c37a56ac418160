"""Compare decoders: calls that pass on the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from slipway_onnx_export.parity.rows import Array, Session
from slipway_onnx_export.source import WINDOW_LIMIT, ModelSource


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation with the model: several calls with some tokens each, which pass on the KV cache.

    Attributes:
        name: Name in messages.
        pads: Left padding of each row, in tokens; the number of rows is the batch size.
        calls: New tokens per row in each call. The first call has an empty past.
    """

    name: str
    pads: tuple[int, ...]
    calls: tuple[int, ...]


CASES = (
    Case("batch 1, prefill and decode", pads=(0,), calls=(6, 1, 1)),
    Case("batch 1, sequence 1 from an empty past, then several tokens", pads=(0,), calls=(1, 4)),
    Case("batch 3, left padding, prefill and decode", pads=(0, 4, 2), calls=(7, 1, 1)),
    Case("batch 2, left padding, several tokens after a past", pads=(3, 0), calls=(5, 3, 1)),
)


@dataclass(frozen=True)
class _Conversation:
    """Inputs of a case; see :class:`slipway_onnx_export.parity.rows.Conversation`."""

    case: Case
    tokens: Array
    mask: Array

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def calls(self) -> int:
        return len(self.case.calls)

    def reference(self, model: Any) -> Iterator[Array]:
        cache = transformers.DynamicCache(config=model.config)
        for index in range(self.calls):
            ids, mask, positions = (torch.from_numpy(array.copy()) for array in self._step(index))
            out = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            yield self._real(index, out.logits.numpy())

    def exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        session = sessions["model"]
        past = session.empty_past(batch=len(self.case.pads))
        for index in range(self.calls):
            ids, mask, positions = self._step(index)
            found = session.run({"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past})
            past = {
                name.replace("present.", "past_key_values."): value
                for name, value in found.items()
                if name.startswith("present.")
            }
            yield self._real(index, found["logits"])

    def _step(self, index: int) -> tuple[Array, Array, Array]:
        """Return token ids, attention mask and positions of one call. (batch, new), (batch, past + new), (batch, new)."""
        past = sum(self.case.calls[:index])
        end = past + self.case.calls[index]
        mask = self.mask[:, :end]
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:]
        return self.tokens[:, past:end], mask, positions

    def _real(self, index: int, logits: Array) -> Array:
        """Select the logits of a call at tokens that are not padding. (batch, new, vocab) → (tokens, vocab)."""
        past = sum(self.case.calls[:index])
        kept: Array = logits[self.mask[:, past : past + self.case.calls[index]].astype(bool)]
        return kept


def conversations_of(source: ModelSource, *, room: int) -> Iterator[_Conversation]:
    """Make the conversations for which a decoder and its graph have room, in tokens."""
    cases = list(CASES)
    if 0 < source.sliding_window <= WINDOW_LIMIT:
        cases.append(Case("beyond the sliding window", pads=(0,), calls=(source.sliding_window + 4, 1)))
    random = np.random.default_rng(0)
    for case in (case for case in cases if sum(case.calls) <= room):
        total = sum(case.calls)
        tokens = random.integers(0, source.text_config.vocab_size, size=(len(case.pads), total), dtype=np.int64)
        mask = (np.arange(total)[None, :] >= np.array(case.pads)[:, None]).astype(np.int64)
        yield _Conversation(case, tokens, mask)
