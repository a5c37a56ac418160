"""Make the calls by which models are compared: of decoders with a KV cache, and of models that read a whole text.

The latter are encoders, and decoders with a classification head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
import transformers

from slipway.model.configuration import token_of
from slipway.model.families import SEQUENCE_CLASSIFIER
from slipway.model.graphs.calls import Promise
from slipway.model.sentences import SENTENCE_EMBEDDING, Pooling, pool
from slipway_onnx_export.forms.components import pooling_of
from slipway_onnx_export.parity.lengths import BEYOND, NEW, Lengths, Reach, cached_shapes, fill_cache, make_up_values
from slipway_onnx_export.parity.rows import Array, BufferedSession, Session, past_of, random_rows
from slipway_onnx_export.source import ModelSource

TEXT_CASES = (
    ("batch 1", (0,), 6, "right"),
    ("sequence 1", (0, 0), 1, "right"),
    ("batch 3, right padding", (0, 4, 2), 9, "right"),
    ("batch 2, left padding", (3, 0), 7, "left"),
)
"""Name, padding of each row, length, and side of the padding."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that are padded, and calls that pass on the cache.

    Attributes:
        name: Name in messages.
        pads: Left padding of each row, in tokens; the number of rows is the batch size.
        calls: New tokens per row in each call. The first call has an empty past.
        ends: Right padding of each row, at the end of the first call; empty for none.
        shared: Whether past and present are one buffer.
        past: Tokens of a made-up cache that the first call gets (:mod:`slipway_onnx_export.parity.lengths`).
        start: Position of each row's first token.
    """

    name: str
    pads: tuple[int, ...]
    calls: tuple[int, ...]
    ends: tuple[int, ...] = ()
    shared: bool = False
    past: int = 0
    start: int = 0

    @property
    def tokens(self) -> int:
        """Return the tokens of each row, padding included."""
        return self.past + sum(self.calls)

    def mask(self) -> Array:
        """Return 1 for a token and 0 for padding, (rows, tokens)."""
        columns, first = np.arange(self.tokens)[None, :], self.past + self.calls[0]
        pads, ends = (np.array(each)[:, None] for each in (self.pads, self.ends or (0,) * len(self.pads)))
        real = (columns >= pads) & ((columns < first - ends) | (columns >= first))
        return real.astype(np.int64)


_LATE = 8
"""Tokens before a threshold at which a late text begins."""

_PREFILL = Case("batch 1, prefill and decode", pads=(0,), calls=(6, 1, 1))
CASES = (
    _PREFILL,
    Case("batch 2, sequence 1 from an empty past, then several tokens", pads=(0, 0), calls=(1, 4)),
    Case("batch 3, left padding, prefill and decode", pads=(0, 4, 2), calls=(7, 1, 1)),
    # Eight tokens: beyond a window, transformers counts the places between a row's prompt and its next token, and mobius its tokens.
    Case(
        "batch 3, left and right padding, several tokens after a past", pads=(3, 0, 0), ends=(0, 0, 2), calls=(5, 2, 1)
    ),
)


_SERVED = (
    _PREFILL,
    Case("batch 2, sequence 1 from an empty past, then decode", pads=(0, 0), calls=(1, 1)),
    Case("batch 1, several tokens after a past, then decode", pads=(0,), calls=(5, 3, 1)),
    Case("batch 3, right padding, prefill and decode", pads=(0, 0, 0), ends=(0, 4, 2), calls=(7, 1, 1)),
)
SERVED_CASES = (*_SERVED, *(replace(case, name=f"{case.name}, one buffer", shared=True) for case in _SERVED))
"""Calls of a graph whose past and present may be one buffer: all that it promises, with two buffers and with one."""


@dataclass(frozen=True)
class _Conversation:
    """Inputs of a case; see :class:`slipway_onnx_export.parity.rows.Conversation`."""

    case: Case
    tokens: Array
    mask: Array
    last_logits: bool = False
    shapes: list[dict[str, tuple[int, int]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def calls(self) -> int:
        return len(self.case.calls)

    def prepare(self, model: Any) -> None:
        if self.case.past:
            self.shapes[:] = cached_shapes(model)

    def run_reference(self, model: Any) -> Iterator[Array]:
        cache = transformers.DynamicCache(config=model.config)
        if self.case.past:
            fill_cache(cache, self.shapes, tokens=self.case.past)
        for index in range(self.calls):
            ids, mask, positions = (torch.from_numpy(array.copy()) for array in self._step(index))
            out = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            yield self._real(index, out.logits.numpy())

    def run_exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        session = sessions["model"]
        if self.case.shared:
            # Only graphs that promise it have such cases.
            session = cast("BufferedSession", session).share_buffer(tokens=sum(self.case.calls) + 3)
        past = session.empty_past(batch=len(self.case.pads))
        if self.case.past:
            past = {
                name: make_up_values(name, heads=value.shape[1], tokens=self.case.past, size=value.shape[3])
                for name, value in past.items()
            }
        for index in range(self.calls):
            ids, mask, positions = self._step(index)
            results = session.run({"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past})
            past = past_of(results)
            yield self._real(index, results["logits"])

    def _step(self, index: int) -> tuple[Array, Array, Array]:
        """Return token ids, attention mask and positions of one call. (batch, new), (batch, past + new), (batch, new)."""
        past = self.case.past + sum(self.case.calls[:index])
        end = past + self.case.calls[index]
        mask = self.mask[:, :end]
        positions = self.case.start + np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:]
        return self.tokens[:, past:end], mask, positions

    def _real(self, index: int, logits: Array) -> Array:
        """Select the logits of a call at tokens that are not padding, or those of each row's last. (batch, new, vocab) → (tokens, vocab)."""
        past, new = self.case.past + sum(self.case.calls[:index]), self.case.calls[index]
        mask = self.mask[:, past : past + new]
        if not self.last_logits:
            kept: Array = logits[mask.astype(bool)]
        elif logits.shape[1] == 1:
            kept = logits[:, 0]
        else:
            kept = logits[np.arange(len(mask)), new - 1 - mask[:, ::-1].argmax(axis=1)]
        return kept


def _past_threshold(size: int, *, start: int, promise: Promise, cached: bool, one_row: bool) -> Iterator[Case]:
    """Make the calls that pass a threshold: token by token, and at once.

    Args:
        size: The threshold.
        start: Position of the first token. Only positions count beyond ``SHORT`` tokens, so the text begins late.
        promise: The calls that the graph takes.
        cached: Whether the graph has a cache. One without reads the whole text as if it were new, whose keys PyTorch's cache has
            rotated before the threshold.
        one_row: Whether the graph takes one row only. If it takes several, the longest decides for all of them.
    """
    what, places = f"past {size} tokens", size - start
    longest = places + BEYOND
    after = (1,) if cached else ()
    if cached:
        yield Case(f"{what}, one by one", pads=(0,), calls=(max(places - 1, 1), 1, 1, BEYOND - 2), start=start)
    else:
        for count in (places, places + 1):
            yield Case(f"{what}, {start + count} of them", pads=(0,), calls=(count,), start=start)
    if one_row:
        yield Case(f"{what} at once", pads=(0,), calls=(longest - 1, *after), start=start)
        return
    short = min(BEYOND + 1, longest - 2)
    pads, ends = ((0, 0), (short, 0)) if promise.shared_buffer else ((short, 0), ())
    yield Case(f"{what} in one of two rows", pads=pads, ends=ends, calls=(longest - 1, *after), start=start)


def conversations_of(
    source: ModelSource,
    *,
    room: int,
    promise: Promise,
    reach: Reach,
    lengths: Lengths,
    cached: bool = True,
    one_row: bool = False,
) -> Iterator[_Conversation]:
    """Make the conversations that a decoder's graph promises to take, and for which both have room, in tokens."""
    cases = list(SERVED_CASES if promise.shared_buffer else CASES)
    if reach.text:
        far = Case("beyond the sliding window", pads=(0,), calls=(reach.window + BEYOND, 1))
        further = replace(far, calls=(*far.calls, 3, 1))
        one = replace(further, name=f"{far.name}, one buffer", shared=True)
        cases += [further, one] if promise.shared_buffer else [far]
    elif reach.past:
        cases.append(Case("beyond the sliding window, of a made-up past", pads=(0,), calls=NEW, past=reach.past))
    for threshold in (*lengths.texts, *lengths.positions):
        start = threshold - _LATE if threshold in lengths.positions else 0
        cases += _past_threshold(threshold, start=start, promise=promise, cached=cached, one_row=one_row)
    random = np.random.default_rng(0)
    for case in (case for case in cases if case.tokens <= room):
        size = (len(case.pads), case.tokens)
        tokens = random.integers(0, source.text_config.vocab_size, size=size, dtype=np.int64)
        yield _Conversation(case, tokens, case.mask(), promise.last_logits)


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
    for name, padded, shortest, side in (*TEXT_CASES, *far):
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
