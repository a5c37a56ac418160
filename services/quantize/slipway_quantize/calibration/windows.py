"""Cut the calibration text into windows of tokens: some to fit to, others to judge by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipway.errors import QuantizationError
from slipway.files.json_documents import parse_json
from slipway.files.regular_file import read_regular
from slipway.model.families import DECODER
from slipway.model.folder import ModelFolder
from slipway.texts import counted
from slipway_quantize.calibration_data.params import TEXTS

LARGEST_TEXTS = 256 << 20
"""Most bytes of text: some hundred times of what a calibration uses."""
LEAST_WINDOWS = 4
_TEXTS_AT_ONCE = 64
_FREE_POSITIONS = 4
"""Positions that a window leaves free: RoBERTa's begin at 2, and a decoder's start token takes one."""
_HELD_OUT = 8
"""One window in so many judges; at most ``_MOST_HELD_OUT``."""
_MOST_HELD_OUT = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows that the model takes at once, padded on the right.

    Attributes:
        tokens: (windows, tokens)
        mask: 1 for text, 0 for padding. (windows, tokens)
        decoder: Tokens of an encoder-decoder's decoder, one more than the encoder's: the start token, then the window. (windows, tokens + 1)
    """

    tokens: Tensor
    mask: Tensor
    decoder: Tensor | None = None

    @property
    def result_mask(self) -> Tensor:
        """1 for positions whose results are compared: the decoder's if there is one."""
        return self.mask if self.decoder is None else torch.nn.functional.pad(self.mask, (1, 0), value=1)

    @property
    def masks(self) -> tuple[Tensor, ...]:
        """The masks of all inputs."""
        return (self.mask,) if self.decoder is None else (self.mask, self.result_mask)

    def first(self) -> Batch:
        """Return the first window alone."""
        return Batch(self.tokens[:1], self.mask[:1], None if self.decoder is None else self.decoder[:1])


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of the calibration text.

    Attributes:
        fit: Windows to fit to.
        held_out: Windows to judge by, which nothing is fitted to.
        digest: SHA-256 of the text.
        padding: Token that fills shorter windows.
        start: An encoder-decoder's first decoder token, and how many tokens its decoder knows; None for other models.
    """

    fit: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    digest: str
    padding: int
    start: tuple[int, int] | None = None

    def batch(self, windows: list[Tensor]) -> Batch:
        """Join windows of any lengths."""
        longest = max(len(window) for window in windows)
        tokens = torch.full((len(windows), longest), self.padding, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, window in enumerate(windows):
            tokens[row, : len(window)] = window
            mask[row, : len(window)] = 1
        if self.start is None:
            return Batch(tokens, mask)
        first, known = self.start
        return Batch(tokens, mask, torch.nn.functional.pad(tokens % known, (1, 0), value=first))


def read_windows(
    data: Path,
    model: ModelFolder,
    *,
    count: int,
    length: int,
    vocabulary: int,
    seed: int,
    start: tuple[int, int] | None = None,
) -> Windows:
    """Cut the text in ``data`` with the tokenizer of ``model``.

    A decoder's texts follow each other, so that all windows are full. Other families see each text alone, between the tokens that the
    tokenizer puts around it.

    Args:
        data: Folder with ``calibration.jsonl``.
        model: The model.
        count: Most windows.
        length: Most tokens of a window; a model with a table of positions gets no more than it has.
        vocabulary: Number of tokens that the model knows.
        seed: Seed of the choice.
        start: As :class:`Windows`.

    Raises:
        QuantizationError: ``CALIBRATION_DATA_INVALID``: no text, too little text, or tokens that the model does not know.
    """
    raw, texts = _read_texts(data)
    tokenizer = _load_tokenizer(model.path)
    cut = _cut_stream if model.family is DECODER else _cut_texts
    length = _limit_length(length, model)
    windows = cut(tokenizer, texts, length)
    if len(windows) < LEAST_WINDOWS:
        raise _invalid_error(
            f"the calibration text gives {counted(len(windows), 'window')} of {length} tokens, and at least {LEAST_WINDOWS} are needed",
            remedy="give more text, or shorter windows",
        )
    largest = max(int(window.max()) for window in windows)
    if largest >= vocabulary:
        raise _invalid_error(
            f"the tokenizer gives token {largest}, and the model knows {vocabulary} tokens",
            remedy="give the tokenizer that the model was trained with",
        )
    order = np.random.default_rng(seed).permutation(len(windows))[:count]
    chosen = [torch.from_numpy(windows[index]) for index in order]
    judging = max(1, min(_MOST_HELD_OUT, len(chosen) // _HELD_OUT))
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    digest = hashlib.sha256(raw).hexdigest()
    return Windows(tuple(chosen[judging:]), tuple(chosen[:judging]), digest, int(padding), start)


def _limit_length(length: int, model: ModelFolder) -> int:
    most = model.config.get("max_position_embeddings")
    if not isinstance(most, int) or isinstance(most, bool) or most <= 2 * _FREE_POSITIONS:
        return length
    return min(length, most - _FREE_POSITIONS)


def _read_texts(data: Path) -> tuple[bytes, list[str]]:
    path = data / TEXTS
    try:
        raw = read_regular(path, largest=LARGEST_TEXTS)
    except OSError as error:
        raise _invalid_error(f"{TEXTS} cannot be read ({error})", remedy="give a folder with this file") from error
    texts = []
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            document = parse_json(line)
        except ValueError as error:
            raise _invalid_error(
                f"line {number} of {TEXTS} is not JSON ({error})", remedy="write one JSON object a line"
            ) from error
        text = document.get("text") if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise _invalid_error(
                f"line {number} of {TEXTS} has no text: {json.dumps(document)[:80]}",
                remedy='write {"text": "…"} on each line',
            )
        texts.append(text)
    return raw, texts


def _load_tokenizer(model: Path) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a tokenizer's own code may raise anything
        raise _invalid_error(
            f"transformers cannot load the model's tokenizer ({(str(error).strip() or type(error).__name__).splitlines()[0][:300]})",
            remedy="merge with the tokenizer (save_tokenizer), or use method rtn",
        ) from error


def _cut_stream(tokenizer: Any, texts: list[str], length: int) -> list[Any]:
    """Cut the texts as one stream, each followed by the end-of-text token; a begin-of-text token starts every window."""
    end = tokenizer.eos_token_id
    stream: list[int] = []
    for ids in _tokenize(tokenizer, texts, add_special_tokens=False):
        stream += ids
        if end is not None and ids and ids[-1] != end:
            stream.append(end)
    begin = tokenizer.bos_token_id
    starts = tokenizer("a")["input_ids"]
    before = [begin] if begin is not None and starts and starts[0] == begin else []
    body = length - len(before)
    cuts = range(0, len(stream) - body + 1, body)
    return [np.array(before + stream[start : start + body], np.int64) for start in cuts]


def _cut_texts(tokenizer: Any, texts: list[str], length: int) -> list[Any]:
    """Cut each text to its first tokens."""
    made = _tokenize(tokenizer, [text for text in texts if text], truncation=True, max_length=length)
    return [np.array(ids, np.int64) for ids in made if ids]


def _tokenize(tokenizer: Any, texts: list[str], **how: Any) -> Iterator[list[int]]:
    """Yield the tokens of each text; the tokenizer's threads share the work of several."""
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        yield from tokenizer(texts[start : start + _TEXTS_AT_ONCE], verbose=False, **how)["input_ids"]


def _invalid_error(problem: str, *, remedy: str) -> QuantizationError:
    return QuantizationError(problem, reason="CALIBRATION_DATA_INVALID", remedy=remedy, about={"file": TEXTS})
