"""Compare encoder–decoders: the encoder once, then decoder calls that pass on the cache, also with rows in another order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from slipway.model.configuration import token_of
from slipway.model.families import RAW_SPEECH, SHORTEST_SOUND, SPEECH
from slipway_onnx_export.parity.lengths import BEYOND, Lengths, Reach
from slipway_onnx_export.parity.rows import Array, Session, past_of, random_rows
from slipway_onnx_export.source import ModelSource

_SAMPLES = 400
"""Samples for each token of a case beyond those of the shortest sound: Moonshine makes a frame of 384."""


@dataclass(frozen=True, slots=True)
class Case:
    """One text or sound, and calls of the decoder.

    Attributes:
        name: Name in messages.
        pads: Padding of each row of the source, in tokens; the number of rows is the batch size.
        length: Tokens of the source with padding.
        calls: New tokens of each decoder call. The first call has an empty past.
        side: Side of the padding.
        reorder: Row that takes each row's place after the second call, as a beam search does; empty for none.
    """

    name: str
    pads: tuple[int, ...]
    length: int
    calls: tuple[int, ...]
    side: Literal["left", "right"] = "right"
    reorder: tuple[int, ...] = ()


CASES = (
    Case("batch 1, eight steps", pads=(0,), length=6, calls=(1,) * 8),
    Case("batch 1, source of one token, several tokens at once", pads=(0,), length=1, calls=(3, 1, 2)),
    Case("batch 3, sources padded on the right, eight steps", pads=(0, 5, 2), length=9, calls=(1,) * 8),
    Case(
        "batch 3, sources padded on the left, rows in another order",
        pads=(1, 0, 3), side="left", length=7, calls=(2, 1, 1, 1, 1, 1, 1, 1), reorder=(2, 2, 0),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class _Translation:
    """Inputs of a case; see :class:`slipway_onnx_export.parity.rows.Conversation`."""

    case: Case
    source: Array
    mask: Array | None
    tokens: Array
    input: str

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def calls(self) -> int:
        return 1 + len(self.case.calls)

    def prepare(self, model: Any) -> None:
        pass

    def run_reference(self, model: Any) -> Iterator[Array]:
        masked = {} if self.mask is None else {"attention_mask": torch.from_numpy(self.mask.copy())}
        encoded = model.get_encoder()(torch.from_numpy(self.source.copy()), **masked)
        yield self._real(encoded.last_hidden_state.numpy())
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for index, tokens in enumerate(self._steps()):
            out = model(
                encoder_outputs=encoded,
                decoder_input_ids=torch.from_numpy(tokens.copy()),
                past_key_values=cache,
                use_cache=True,
                **masked,
            )
            yield out.logits.numpy().ravel()
            if index == 1 and self.case.reorder:
                order = torch.tensor(self.case.reorder)
                cache.reorder_cache(order)
                encoded = type(encoded)(**{name: value[order] for name, value in encoded.items()})
                masked = {name: value[order] for name, value in masked.items()}

    def run_exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        masked = {} if self.mask is None else {"attention_mask": self.mask}
        results = sessions["encoder_model"].run({self.input: self.source, **masked})
        encoded = results["last_hidden_state"]
        yield self._real(encoded)
        decoder, mask = sessions["decoder_model"], masked.get("attention_mask")
        # A graph without a cache takes the encoder's result, one with a cache the keys and values made from it.
        past = {"encoder_hidden_states": encoded, **decoder.empty_past(batch=len(self.source)), **past_of(results)}
        for index, tokens in enumerate(self._steps()):
            feed = {"input_ids": tokens, **past}
            results = decoder.run(feed if mask is None else feed | {"encoder_attention_mask": mask})
            past |= past_of(results)
            yield results["logits"].ravel()
            if index == 1 and self.case.reorder:
                order = list(self.case.reorder)
                past = {name: value[order] for name, value in past.items()}
                mask = None if mask is None else mask[order]

    def _steps(self) -> Iterator[Array]:
        start = 0
        for count in self.case.calls:
            yield self.tokens[:, start : start + count]
            start += count

    def _real(self, encoded: Array) -> Array:
        """Select the encoder's results at tokens that are not padding, and all of sound. (batch, source, width) → (tokens, width)."""
        per_token = self.mask is not None and self.mask.shape == encoded.shape[:2]
        kept: Array = encoded[self.mask.astype(bool)] if self.mask is not None and per_token else encoded
        return kept.ravel()


def translations_of(
    source: ModelSource, *, room: int, reach: Reach, lengths: Lengths, cached: bool = True
) -> Iterator[_Translation]:
    """Make the sources and decoder inputs for which a model and its graphs have room, in tokens."""
    config = source.config
    targets = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    random = np.random.default_rng(0)
    far = [Case("source beyond the sliding window", pads=(0,), length=reach.window + BEYOND, calls=(1, 1))]
    far = far if reach.text else []
    for size in lengths.texts:
        steps = (max(size - 1, 1), 1, 1, BEYOND - 2)
        far += [
            Case(f"source past {size} tokens", pads=(0,), length=size + BEYOND, calls=(1, 1)),
            Case(f"past {size} tokens", pads=(0,), length=size, calls=steps if cached else (sum(steps),)),
        ]
    for case in (*CASES, *far):
        if sum(case.calls) > room or case.length > room:
            continue
        tokens = random.integers(0, targets, size=(len(case.pads), sum(case.calls)), dtype=np.int64)
        padding = token_of(config, "pad_token_id")
        if (
            padding is not None
        ):  # some models count positions by the tokens that are no padding, which a cache does not keep
            tokens = np.where(tokens == padding, (padding + 1) % targets, tokens)
        tokens[:, 0] = source.start
        name = source.family.inputs[0]
        if source.family is RAW_SPEECH:
            count = SHORTEST_SOUND + _SAMPLES * case.length
            sound = random.standard_normal((len(case.pads), count)).astype(np.float32)
            places, pads = np.arange(count)[None, :], _SAMPLES * np.array(case.pads)[:, None]
            heard = (places >= pads if case.side == "left" else places < count - pads).astype(np.int64)
            yield _Translation(case, np.where(heard == 1, sound, np.float32(0)), heard, tokens, name)
            continue
        if source.family is SPEECH:
            shape = (len(case.pads), config.num_mel_bins, 2 * config.max_source_positions)
            yield _Translation(case, random.standard_normal(shape).astype(np.float32), None, tokens, name)
            continue
        ids, mask = random_rows(
            random,
            vocabulary=config.vocab_size,
            pads=case.pads,
            length=case.length,
            side=case.side,
            padding=padding,
        )
        yield _Translation(case, ids, mask, tokens, name)
