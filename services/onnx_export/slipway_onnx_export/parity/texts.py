"""Compare models that read a whole text in one call: encoders, and decoders with a classification head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipway.model.families import SEQUENCE_CLASSIFIER
from slipway.model.generation import token_of
from slipway.model.sentences import SENTENCE_EMBEDDING, Pooling, pool
from slipway_onnx_export.components import pooling_of
from slipway_onnx_export.parity.lengths import BEYOND, Lengths, Reach
from slipway_onnx_export.parity.rows import Array, Session, random_rows
from slipway_onnx_export.source import ModelSource

CASES = (
    ("batch 1", (0,), 6, "right"),
    ("sequence 1", (0, 0), 1, "right"),
    ("batch 3, right padding", (0, 4, 2), 9, "right"),
    ("batch 2, left padding", (3, 0), 7, "left"),
)
"""Name, padding of each row, length, and side of the padding."""


@dataclass(frozen=True)
class _TextCall:
    """One call; see :class:`slipway_onnx_export.parity.rows.Conversation`."""

    name: str
    feed: dict[str, Array]
    outputs: tuple[str, ...]
    pooling: Pooling | None = None
    calls: int = 1

    def prepare(self, model: Any) -> None:
        pass

    def run_reference(self, model: Any) -> Iterator[Array]:
        feed = {name: torch.from_numpy(value.copy()) for name, value in self.feed.items()}
        results = dict(model(**feed))
        if self.pooling:
            results[SENTENCE_EMBEDDING] = pool(results["last_hidden_state"], feed["attention_mask"], self.pooling)
        yield self._real({name: results[name].numpy() for name in self._compared})

    def run_exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        yield self._real(sessions["model"].run(self.feed))

    @property
    def _compared(self) -> tuple[str, ...]:
        return (*self.outputs, *((SENTENCE_EMBEDDING,) if self.pooling else ()))

    def _real(self, results: Mapping[str, Array]) -> Array:
        """Join all outputs: whole ones, and those that have a value per token without padding."""
        mask = self.feed["attention_mask"].astype(bool)
        kept = [results[name] for name in self._compared]
        return np.concatenate([(one[mask] if one.shape[:2] == mask.shape else one).ravel() for one in kept])


def texts_of(
    source: ModelSource, *, room: int, reach: Reach, lengths: Lengths, fixed: bool = False
) -> Iterator[_TextCall]:
    """Make the texts for which a model and its graph have room, in tokens.

    A graph of a fixed length gets each text with padding on its right. Texts with padding on their left are as long as the graph,
    because the results of some models at padding (DeBERTa's first token) depend on the length.
    """
    config = source.text_config
    padding = token_of(config, "pad_token_id")
    random, pooling = np.random.default_rng(0), pooling_of(source)
    far = [("beyond the sliding window", (0,), reach.window + BEYOND, "right")] if reach.text else []
    for size in lengths.texts:
        far += [(f"{size} tokens", (0,), size, "right"), (f"past {size} tokens", (0,), size + BEYOND, "right")]
    alone = padding is None and source.family is SEQUENCE_CLASSIFIER  # it cannot tell the last token from padding
    for name, padded, shortest, side in (*CASES, *far):
        if shortest > room or (any(padded) and alone):
            continue
        pads = padded[:1] if alone else padded
        length = room if fixed and side == "left" else shortest
        ids, mask = random_rows(
            random, vocabulary=config.vocab_size, pads=pads, length=length, side=side, padding=padding
        )
        end = source.end
        if config.is_encoder_decoder and end is not None:  # its classifier reads the end of the text
            ids = np.where(ids == end, (end + 1) % config.vocab_size, ids)
            ids[np.arange(len(pads)), length - 1 - np.array(pads) * (side == "right")] = end
        feed = {"input_ids": ids, "attention_mask": mask}
        kinds = int(getattr(config, "type_vocab_size", 0) or 0)
        if kinds > 1:
            feed["token_type_ids"] = (np.arange(length)[None, :] >= length // 2).astype(np.int64).repeat(len(pads), 0)
        yield _TextCall(name, feed, source.family.outputs, pooling)
